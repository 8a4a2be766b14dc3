from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.limit import Ceiling, ModelLimit, StepWork
from benchmarks.report import Report
from benchmarks.session import Session, runner_of
from benchmarks.workload import Workload
from nanoengine.core.messages import Run, StepPlan
from tests.models.families import engine, family_checkpoint
from tests.support import QWEN3_06B

NO_COMPUTE = Ceiling(read_bytes_s=32.3e9, flop_s=float("inf"))
NO_MEMORY = Ceiling(read_bytes_s=float("inf"), flop_s=2.63e12)
LIMIT = ModelLimit(QWEN3_06B, 2, QWEN3_06B.kv_bytes_per_token(2))


def test_a_decode_step_reads_all_weights_and_the_context() -> None:
    assert LIMIT.weight_bytes == 2 * 596_049_920
    assert LIMIT.kv_bytes == 2 * 28 * 8 * 128 * 2
    one = LIMIT.seconds(StepWork(1, 1, 0, 0), NO_COMPUTE)
    assert one == pytest.approx(0.0369, rel=0.002), "1.192 GB at 32.3 GB/s"
    many = LIMIT.seconds(StepWork(16, 16, 16 * 1000, 16 * 1000), NO_COMPUTE)
    assert many - one == pytest.approx(16_000 * LIMIT.kv_bytes / 32.3e9)


def test_a_prefill_multiplies_every_layer_for_every_token_and_the_head_once() -> None:
    head = 151936 * 1024
    layers = 596_049_920 - head
    n = 2048
    flop = 2 * layers * n + 2 * head + 4 * 28 * 16 * 128 * n * (n + 1) / 2
    work = StepWork(n, 1, n, n * (n + 1) // 2)
    assert LIMIT.seconds(work, NO_MEMORY) == pytest.approx(flop / 2.63e12)
    assert LIMIT.seconds(work, Ceiling(1e9, 2.63e12)) > LIMIT.seconds(work, NO_MEMORY), "the slower of the two counts"


def test_the_work_of_a_step() -> None:
    chunks = [Run(0, 16, 3, samples=True), Run(1, 0, 4, samples=False)]
    # Queries 17, 18, 19 see 17 + 18 + 19 keys; those of the other sequence 1 + 2 + 3 + 4.
    prefill = StepWork(num_tokens=7, num_sampled=1, num_context=23, num_pairs=54 + 10)
    assert StepWork.of_plan(StepPlan(runs=chunks)) == prefill
    rows, starts = np.array([2, 3], np.int32), np.array([16, 4], np.int32)
    decode = StepWork(num_tokens=2, num_sampled=2, num_context=22, num_pairs=22)
    assert StepWork.of_plan(StepPlan(decode_rows=rows, decode_starts=starts)) == decode
    both = StepWork(*(a + b for a, b in zip(prefill, decode, strict=True)))
    assert StepWork.of_plan(StepPlan(decode_rows=rows, decode_starts=starts, runs=chunks)) == both
    assert StepWork.of_plan(StepPlan(runs=[Run(0, 4, 3, True, drafts=(8, 9))])) == StepWork(3, 3, 7, 5 + 6 + 7)
    assert LIMIT.seconds(StepWork.of_plan(StepPlan()), NO_COMPUTE) == 0.0
    assert all(type(number) is int for number in both), "sums of columns become plain numbers, as JSON takes them"


def test_a_workload_is_one_prefill_and_the_decode_steps_that_are_needed() -> None:
    workload = Workload([[1] * 10, [2] * 20], output_lens=[3, 2])
    steps = [
        StepWork(30, 2, 30, 55 + 210),
        StepWork(2, 2, 11 + 21, 11 + 21),  # the second token of each
        StepWork(1, 1, 12, 12),  # the third of the first
    ]
    for limit in (NO_COMPUTE, NO_MEMORY, Ceiling(1e10, 1e12)):
        expected = sum(LIMIT.seconds(step, limit) for step in steps)
        assert LIMIT.workload_seconds(workload, limit) == pytest.approx(expected)


@pytest.mark.parametrize(("kv_cache_dtype", "numbers", "scale"), [("auto", 4, 0), ("int8", 1, 4)])
@pytest.mark.parametrize(("shape", "num_layers"), [("Qwen3, yarn", 2), ("Gemma3", 7), ("LFM2", 1)])
def test_kv_of_a_token_is_what_the_pool_holds_of_it(
    shape: str, num_layers: int, kv_cache_dtype: str, numbers: int, scale: int, tmp_path: Path
) -> None:
    """Layers that share memory, as those with windows and those without do, all keep the token; layers with states do not."""
    with engine(family_checkpoint(tmp_path, shape), kv_cache_dtype=kv_cache_dtype) as llm:
        session = Session(llm, Report("some"), runner_of(llm))
        config = session.model_config
        head = config.head_dim * numbers + scale
        assert session.limit.kv_bytes == 2 * num_layers * config.num_kv_heads * head
        one, two = (session.limit.seconds(StepWork(1, 1, context, context), NO_COMPUTE) for context in (0, 100))
        assert two - one == pytest.approx(100 * session.limit.kv_bytes / NO_COMPUTE.read_bytes_s)
