"""Who waits for room, or for a prompt that another computes."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine.core.sampling_params import SamplingParams

from .toys import make_engine


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
