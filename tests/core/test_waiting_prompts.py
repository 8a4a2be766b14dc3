"""A long prompt that finds no room costs nothing while it waits."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine.core.sampling_params import SamplingParams

from .toys import make_engine


def test_a_prompt_is_not_looked_up_again_before_it_can_find_room(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(num_blocks=200, max_model_len=700)
    old = list(range(50)) * 10
    for prompt, max_tokens in ((old, 1), ([3] * 300, 300), (old + [5] * 100, 4)):
        params = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
        engine.submit(request := engine.make_request(prompt, params))
        engine.step()
    lookups, blocks = [], engine.scheduler.blocks
    has = blocks.has
    monkeypatch.setattr(blocks, "has", lambda *block: lookups.append(block) or has(*block))
    while not request.sequences[0].block_tables:
        engine.step()
        assert engine.scheduler.num_steps < 1000
    assert engine.scheduler.num_steps > 250
    assert len(lookups) < 150 * 20, "it was looked up a few times, and not in each of 300 steps"
    while engine.has_unfinished:
        engine.step()


def test_room_that_comes_is_taken_at_once() -> None:
    engine = make_engine(num_blocks=40, max_model_len=150)
    requests: list[Any] = []
    for seed, num_prompt in enumerate((90, 60, 100)):
        params = SamplingParams(max_tokens=10 + seed, seed=seed, ignore_eos=True)
        requests.append(engine.make_request([seed] * num_prompt, params))
        engine.submit(requests[-1])
    while not requests[0].finished:
        assert not requests[2].sequences[0].block_tables
        engine.step()
    while not requests[1].finished:
        engine.step()
    engine.step()
    assert requests[2].sequences[0].block_tables
    while engine.has_unfinished:
        engine.step()


def test_completions_of_a_long_prompt_look_it_up_twice_and_not_after_each_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(num_blocks=400, max_model_len=700, max_num_batched_tokens=64, max_chunk=16)
    lookups, blocks = [], engine.scheduler.blocks
    find = blocks.find
    monkeypatch.setattr(blocks, "find", lambda seq: lookups.append(seq) or find(seq))
    params = SamplingParams(n=8, max_tokens=3, seed=1, ignore_eos=True)
    engine.submit(request := engine.make_request([3, 5] * 200, params))
    while engine.has_unfinished:
        engine.step()
    assert all(seq.num_cached_tokens >= 396 for seq in request.sequences[1:])
    assert len(lookups) <= 1 + 2 * 7
