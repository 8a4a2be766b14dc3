"""The engine on an NVIDIA GPU in float32: its tokens are those of the CPU, however it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.modes import modes_of, running_in
from nanoengine import LLM, SamplingParams
from tests.e2e.small_engine import assert_idle
from tests.gpu.engines import TINY_POOL, Tokens, every_mode, generate, open_llm, requests
from tests.gpu.marks import needs_gpu
from tests.support import backend_of, fill_kv_with_nan, model_runner

pytestmark = needs_gpu

PATHS = {
    "triton": {"kernels": "triton", "attention_backend": "triton"},
    "torch": {"kernels": "torch"},
    "triton with torch's attention": {"kernels": "triton", "attention_backend": "torch"},
}
POOLS: dict[str, dict[str, Any]] = {
    "room": {},
    "tiny": {"num_kv_blocks": TINY_POOL},
    "blocks of 64": {"block_size": 64, "num_kv_blocks": 100},
    "small steps": {"max_num_batched_tokens": 24},
    "mixed steps": {"max_num_batched_tokens": 24, "scheduling_policy": "mixed"},
}
COMBINATIONS = [*(("triton", pool) for pool in POOLS), *((path, "tiny") for path in PATHS if path != "triton")]


@pytest.fixture(scope="module", params=COMBINATIONS, ids=", ".join)
def llm(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    path, pool = request.param
    with open_llm(checkpoint, **PATHS[path] | POOLS[pool]) as llm:
        yield llm


def test_tokens_are_those_of_the_cpu_in_every_mode(llm: LLM, expected: Tokens) -> None:
    """Graphs are recorded where all kernels are Triton's, and two steps are in flight."""
    runner, scheduler, (prompts, params) = model_runner(llm), llm.engine.scheduler, requests()
    assert (runner.recorder is not None) == (runner.kernels.name == backend_of(llm).name == "triton")
    assert llm.engine.depth == 2
    for mode in modes_of(llm):
        llm.reset_prefix_cache()
        fill_kv_with_nan(llm)
        before = scheduler.num_preemptions, llm.cache_stats.num_hit_tokens
        with running_in(llm, mode):
            assert generate(llm, prompts, params) == expected, mode
            again = llm.cache_stats.num_hit_tokens
            assert generate(llm, prompts[::-1], params[::-1])[::-1] == expected, f"{mode}, from the prefix cache"
        assert llm.cache_stats.num_hit_tokens > again > before[1]
        if llm.config.num_kv_blocks == TINY_POOL:
            assert scheduler.num_preemptions > before[0]


def test_logprobs_best_of_bans_and_penalties_are_those_of_the_cpu(checkpoint: Path) -> None:
    """Whatever is asked for, a recorded step ends at the logits."""
    prompts, _ = requests(12, seed=1)
    params = [
        SamplingParams(
            temperature=0.7 * (i % 2),
            seed=i,
            max_tokens=12,
            min_tokens=5 * (i % 3 == 0),
            logprobs=3 if i % 4 == 0 else None,
            best_of=2 if i % 6 == 5 else None,
            repetition_penalty=1.3 if i % 5 == 1 else 1.0,
            frequency_penalty=0.7 if i % 5 == 2 else 0.0,
            logit_bias={7: 3.0} if i % 5 == 3 else {},
        )
        for i in range(len(prompts))
    ]
    with open_llm(checkpoint, device="cpu", kernels="torch") as llm:
        tokens, logprobs = tokens_and_logprobs(llm, prompts, params)
    with open_llm(checkpoint) as llm:
        for mode in every_mode(llm):
            with running_in(llm, mode):
                found, near = tokens_and_logprobs(llm, prompts, params)
                assert found == tokens, mode
                assert near == pytest.approx(logprobs, abs=1e-3), mode


def tokens_and_logprobs(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[list[int]], list[float]]:
    """Of every completion; the log probabilities are summed up, and 0 where nobody has asked for them."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_idle(llm)
    completions = [completion for output in outputs for completion in output.outputs]
    return [own.token_ids for own in completions], [own.cumulative_logprob or 0.0 for own in completions]
