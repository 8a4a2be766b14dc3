from __future__ import annotations

from copy import copy

import numpy as np
import pytest

from nanoengine.engine.kv.groups import KVSpec
from nanoengine.engine.messages import Chunk, Decodes, Drafted, FileWrite, Place, StepPlan, StepResult, Tier
from nanoengine.engine.metrics import EngineStats
from nanoengine.sampling_params import SamplingParams
from tests.engine.engine_toys import Script, make_engine, run
from tests.engine.toys import ToyModel

NOTHING = StepResult([])


def prefill(num_tokens: int) -> StepPlan:
    return StepPlan(chunks=[Chunk(0, 0, num_tokens, (0,))])


def decode(num_rows: int, *chunks: Chunk) -> StepPlan:
    return StepPlan(
        decodes=Decodes(np.arange(num_rows, dtype=np.int32), np.full(num_rows, 5, np.int32)), chunks=list(chunks)
    )


def test_rates_of_an_idle_engine_are_zero() -> None:
    assert (EngineStats().prefill_rate, EngineStats().decode_rate) == (0.0, 0.0)


def test_prefill_and_decode_are_counted_apart() -> None:
    stats = EngineStats()
    stats.record(prefill(100), NOTHING, 2.0)
    stats.record(decode(6), NOTHING, 0.5)
    stats.record(decode(4), NOTHING, 0.5)
    assert (stats.num_prefill_steps, stats.num_mixed_steps, stats.num_decode_steps) == (1, 0, 2)
    assert (stats.prefill_tokens, stats.prefill_time, stats.prefill_rate) == (100, 2.0, 50.0)
    assert (stats.decode_tokens, stats.decode_time, stats.decode_rate) == (10, 1.0, 10.0)


def test_a_step_that_takes_no_time_does_not_divide_by_zero() -> None:
    stats = EngineStats()
    stats.record(prefill(5), NOTHING, 0.0)
    assert stats.prefill_rate == 0.0


def test_rates_may_be_those_since_an_earlier_moment() -> None:
    stats = EngineStats()
    stats.record(prefill(100), NOTHING, 2.0)
    stats.record(decode(6), NOTHING, 0.5)
    before = copy(stats)
    stats.record(decode(9), NOTHING, 1.0)
    since = stats.since(before)
    assert since == EngineStats(decode_tokens=9, decode_time=1.0, num_decode_steps=1)
    assert (since.prefill_rate, since.decode_rate) == (0.0, 9.0)


def test_the_time_of_a_mixed_step_is_shared_out_by_its_tokens() -> None:
    stats = EngineStats()
    stats.record(decode(2, Chunk(7, 0, 5, ()), Chunk(8, 4, 1, (8,))), NOTHING, 4.0)
    assert (stats.decode_tokens, stats.decode_time) == (2, 1.0)
    assert (stats.prefill_tokens, stats.prefill_time) == (6, 3.0)
    assert (stats.num_prefill_steps, stats.num_mixed_steps, stats.num_decode_steps) == (0, 1, 0)


def test_of_drafts_those_count_that_became_tokens() -> None:
    stats, plan = EngineStats(), decode(2, Chunk(7, 0, 3, ()))
    plan.drafted = [Drafted(3, 9, (1, 2, 3)), Drafted(4, 9, (1,)), Drafted(5, 9, (1, 2))]
    stats.record(plan, StepResult([], num_accepted=[2, 0, 2]), 7.0)
    assert (stats.decode_tokens, stats.decode_time) == (2 + 3 + 1 + 3, 5.5)
    assert (stats.prefill_tokens, stats.prefill_time) == (3, 1.5)


def test_a_step_that_only_copies_counts_as_none() -> None:
    stats = EngineStats()
    stats.record(StepPlan(writes=[FileWrite("file", b"", Place(Tier.DEVICE, 1))]), NOTHING, 3.0)
    stats.record(StepPlan(wait=True), NOTHING, 3.0)
    assert stats == EngineStats()


# ---- the snapshot


def test_a_snapshot_has_the_counters_of_all_rooms() -> None:
    engine = make_engine(ToyModel(), eos=(), num_blocks=4, max_model_len=16)
    requests = [engine.add_request([n] * 6, SamplingParams(max_tokens=9)) for n in (1, 2)]
    waiting = engine.metrics()
    assert (waiting.num_waiting, waiting.num_running, waiting.num_requests, waiting.finished) == (2, 0, 2, {})
    engine.step()
    running = engine.metrics()
    assert (running.num_waiting, running.num_fetching, running.num_running) == (0, 0, 2)
    assert running.kv_usage == 1.0
    run(engine, *requests)
    engine.abort(engine.add_request([3]).request_id)
    done = engine.metrics()
    assert (done.num_waiting, done.num_running, done.num_in_flight, done.kv_usage) == (0, 0, 0, 0.0)
    assert (done.num_preemptions, done.num_recomputes, done.num_swaps) == (1, 1, 0)
    assert done.steps.prefill_tokens + done.steps.decode_tokens == engine.executor.num_computed
    assert (done.num_requests, done.finished) == (3, {"length": 2, "abort": 1})
    assert done.cache.num_queried_tokens == 12


def test_a_snapshot_says_what_the_pool_holds() -> None:
    metrics = make_engine(num_blocks=24, block_size=4, max_model_len=64).metrics()
    assert (metrics.num_blocks, metrics.block_size, metrics.max_model_len) == (24, 4, 64)
    assert metrics.max_concurrency == 1.5


def test_layers_that_forget_make_room_for_more_sequences() -> None:
    specs = (KVSpec(), KVSpec("window", 8))
    metrics = make_engine(ToyModel(specs=specs), specs=specs, num_blocks=48, max_model_len=64, budget=5).metrics()
    most = 64 // 4 + (8 + 5 - 1) // 4 + 1  # of the one group, and of the other
    assert metrics.max_concurrency == 48 / most


def test_a_snapshot_does_not_change_with_the_engine() -> None:
    engine = make_engine()
    engine.add_request("abc", SamplingParams(n=2, max_tokens=3))
    engine.step()
    before = engine.metrics()
    run(engine, engine.add_request("other", SamplingParams(max_tokens=1)))
    after = engine.metrics()
    assert (before.steps.decode_tokens, before.finished, before.cache.num_queried_tokens) == (0, {}, 3)
    assert (after.steps.decode_tokens, after.finished, after.cache.num_queried_tokens) == (4, {"length": 3}, 8)
    assert (before.num_forks, after.num_forks) == (1, 1)


@pytest.mark.parametrize(("text", "reason"), [("hello", "stop"), ("x" * 99, "length")])
def test_every_completion_is_counted_by_its_end(text: str, reason: str) -> None:
    engine = make_engine(Script(text))
    run(engine, *[engine.add_request("a", SamplingParams(n=2, max_tokens=7)) for _ in range(3)])
    assert engine.metrics().finished == {reason: 6}


def test_those_that_ended_with_an_error_are_counted_too() -> None:
    executor = Script()
    engine = make_engine(executor, max_num_seqs=2)
    for prompt in "abc":
        engine.add_request(prompt)
    executor.errors = [OSError("broken")]
    run(engine)
    assert engine.metrics().finished == {"error": 2, "stop": 1}
