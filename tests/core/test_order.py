"""Who runs first, who gives way, and who waits for room or for a prompt that another computes."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine.core.sampling_params import CoreSamplingParams

from .toys import check, make_engine, run

PARAMS = CoreSamplingParams(max_tokens=20, ignore_eos=True, seed=1)


def test_a_smaller_priority_comes_first_and_equals_go_by_their_arrival() -> None:
    engine = make_engine(max_num_seqs=1)
    priorities = [0, 1, -(2**63), 0, 1]
    requests = [engine.make_request([number], PARAMS, priority=own) for number, own in enumerate(priorities)]
    for request in requests:
        engine.submit(request)
    ended = []
    while engine.has_unfinished:
        ended += [requests.index(request) for request in engine.step() if request.finished]
    assert ended == [2, 0, 3, 1, 4]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_who_came_last_gives_way_and_resumes_before_those_who_wait(policy: str, depth: int) -> None:
    engine = make_engine(num_blocks=16, policy=policy, depth=depth)
    requests = [engine.make_request([number] * (13 - 3 * number), PARAMS) for number in range(4)]
    for request in requests:
        engine.submit(request)
    while engine.has_unfinished:
        engine.step()
        check(engine.scheduler)
        running = [seq.seq_id for seq in engine.scheduler.running]
        assert running == sorted(running)
        assert all(seq.seq_id > running[-1] for seq in engine.scheduler.waiting if running)
    counts = [request.sequences[0].num_preemptions for request in requests]
    assert counts[0] == 0, "the first always goes on"
    assert counts[3] > 0
    assert {request.output().num_cached_tokens for request in requests} == {0}, "what it finds of its own is no hit"


def test_who_runs_gives_way_only_to_one_who_runs() -> None:
    engine = make_engine(num_blocks=15)
    late = engine.make_request([1] * 30, PARAMS, priority=5)
    engine.submit(late)
    engine.step()
    run(engine, [engine.make_request([2] * 39, PARAMS, priority=-5)])
    assert late.sequences[0].num_preemptions == 0


def test_room_that_comes_is_taken_at_once_and_nobody_overtakes_who_waits_for_it() -> None:
    engine = make_engine(num_blocks=40, max_model_len=150)
    requests: list[Any] = []
    for seed, num_prompt in enumerate((90, 60, 100, 2)):
        params = CoreSamplingParams(max_tokens=10 + seed, seed=seed, ignore_eos=True)
        requests.append(engine.make_request([seed] * num_prompt, params))
        engine.submit(requests[-1])
    while not requests[0].finished:
        assert not any(request.sequences[0].block_tables for request in requests[2:])
        engine.step()
    while not requests[1].finished:
        engine.step()
    engine.step()
    assert requests[2].sequences[0].block_tables
    run(engine, [])
    run(engine, [engine.make_request([4], PARAMS)])
    assert len(engine.executor.rows) == 1, "the runner knows which rows have ended"


def test_completions_of_a_long_prompt_look_it_up_twice_and_not_after_each_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(num_blocks=400, max_model_len=700, max_num_batched_tokens=64, max_chunk=16)
    lookups, blocks = [], engine.scheduler.blocks
    find = blocks.find
    monkeypatch.setattr(blocks, "find", lambda seq: lookups.append(seq) or find(seq))
    params = CoreSamplingParams(n=8, max_tokens=3, seed=1, ignore_eos=True)
    engine.submit(request := engine.make_request([3, 5] * 200, params))
    while engine.has_unfinished:
        engine.step()
    assert all(seq.num_cached_tokens >= 396 for seq in request.sequences[1:])
    assert len(lookups) <= 1 + 2 * 7
