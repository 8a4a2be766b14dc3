from __future__ import annotations

import itertools
import random

import pytest

from benchmarks.workload import NANO_VLLM, constant_arrivals, poisson_arrivals, random_workload


def test_the_published_workload_of_nano_vllm() -> None:
    workload = random_workload(*NANO_VLLM, vocab_size=151936, seed=0)
    assert len(workload) == 256
    assert sum(map(len, workload.prompts)) == 142_827
    assert workload.num_output_tokens == 133_966
    rng = random.Random(0)
    first = [rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))]
    assert workload.prompts[0] == first


def test_arrivals() -> None:
    times = poisson_arrivals(rate=20.0, count=20_000, seed=0)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0
    assert min(gaps) >= 0
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 20, rel=0.03)
    squares = sum((gap - 1 / 20) ** 2 for gap in gaps) / len(gaps)
    assert squares**0.5 == pytest.approx(1 / 20, rel=0.05), "exponential gaps: as wide as they are long"
    assert times == poisson_arrivals(rate=20.0, count=20_000, seed=0)
    assert constant_arrivals(rate=4.0, count=3) == [0.0, 0.25, 0.5]
