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


def test_lengths_do_not_depend_on_the_vocabulary() -> None:
    large, small = (random_workload(20, (3, 9), (2, 6), vocab_size=size, seed=3) for size in (151936, 300))
    assert large != random_workload(20, (3, 9), (2, 6), vocab_size=151936, seed=4)
    assert large.output_lens == small.output_lens
    assert [len(prompt) for prompt in large.prompts] == [len(prompt) for prompt in small.prompts]
    assert all(token < 300 for prompt in small.prompts for token in prompt)
    assert {len(prompt) for prompt in small.prompts} <= set(range(3, 10))
    assert set(small.output_lens) <= set(range(2, 7))


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
