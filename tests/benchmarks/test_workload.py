from __future__ import annotations

import random

import pytest

from benchmarks.workload import NANO_VLLM, SCENARIOS, lens_of_workload, random_workload


def test_the_published_workload_of_nano_vllm() -> None:
    workload = random_workload(*NANO_VLLM, vocab_size=151936, seed=0)
    assert len(workload) == 256
    assert sum(map(len, workload.prompts)) == 142_827
    assert workload.num_output_tokens == 133_966
    rng = random.Random(0)
    first = [rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))]
    assert workload.prompts[0] == first


@pytest.mark.parametrize("name", SCENARIOS)
def test_workloads_of_the_table(name: str) -> None:
    scenario = SCENARIOS[name]
    work, again, other = (scenario.workload(4000, seed) for seed in (3, 3, 4))
    assert work == again != other
    assert len(work) == scenario.num_seqs
    assert max(len(own) + n for own, n in zip(work.prompts, work.output_lens, strict=True)) <= scenario.longest
    prefix = scenario.prefix(work)
    assert (prefix is None) == (scenario.num_shared == 0)
    assert prefix is None or all(own[: scenario.num_shared] == prefix.prompts[0] for own in work.prompts)


def test_what_still_runs_of_a_workload() -> None:
    assert len(lens_of_workload(256)) == 256
    assert len(lens_of_workload(8, scale=40)) == 8
    assert min(lens_of_workload(256)) >= 100
