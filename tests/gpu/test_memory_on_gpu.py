"""The memory of an NVIDIA GPU: the pool takes what is left, steps of full size fit beside it, and closing gives it all back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.errors import InvalidConfig, KVCacheTooSmall
from tests.e2e.small_engine import assert_idle
from tests.gpu.engines import DEVICE, MODEL
from tests.gpu.marks import needs_gpu
from tests.support import model_runner, tiny_checkpoint

pytestmark = needs_gpu

MAX_NUM_SEQS = 256
BLOCK_SIZE = 256
"""Large, since a card holds millions of small ones, each an object in Python."""

CONTEXT = 1 << 20
"""Positions of the model: so many sequences of that length fill any card, and the pool's size follows from the memory alone."""

HOLD = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
SLACK = 1 << 30
"""CUDA's own memory for a process and its kernels, which nobody gives back before the process ends."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits are as large as those of real ones, and much of what a step takes."""
    folder = tmp_path_factory.mktemp("wide")
    return tiny_checkpoint(folder, **MODEL | {"vocab_size": 151936, "max_position_embeddings": CONTEXT})


@contextmanager
def another_process(num_bytes: int) -> Iterator[None]:
    """It holds so many bytes of the card."""
    command = [sys.executable, "-c", HOLD, str(num_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield
        finally:
            process.kill()


def open_wide(folder: Path, **options: Any) -> LLM:
    sizes = {"max_num_seqs": MAX_NUM_SEQS, "block_size": BLOCK_SIZE}
    return LLM(str(folder), device=DEVICE, use_tqdm=False, **{"dtype": "bfloat16"} | sizes | options)


def run_in_full_size(llm: LLM) -> None:
    """Prefills of the whole token budget, then decodes of as many sequences as can run, sampled the costly ways."""
    prompts = [[(i + j) % 1000 for j in range(90)] for i in range(MAX_NUM_SEQS)]
    common = {"temperature": 0.8, "top_p": 0.9, "ignore_eos": True, "max_tokens": 8}
    for costly in (False, True):  # penalties, and log probabilities of half of the rows and a third of the prompts
        params = [
            SamplingParams(
                **common,
                top_k=50 * (i % 2),
                min_p=0.01 * (i % 3),
                seed=i,
                logprobs=5 if costly and i % 2 else None,
                frequency_penalty=float(costly),
                prompt_logprobs=2 if costly and i % 3 == 0 else None,
            )
            for i in range(MAX_NUM_SEQS)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
    assert_idle(llm)


def pool_bytes(llm: LLM) -> int:
    return sum(tensor.nbytes for place in model_runner(llm).kv_cache.pool_layers for tensor in place)


@pytest.mark.parametrize("utilization", [0.5, 0.98])
def test_the_pool_takes_its_share_and_full_steps_fit_beside_it(wide: Path, utilization: float) -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    with open_wide(wide, gpu_memory_utilization=utilization) as llm:
        run_in_full_size(llm)
        used = total - torch.cuda.mem_get_info()[0]
        assert used <= utilization * total + SLACK
        assert pool_bytes(llm) > utilization * total - (total - free) - 8 * SLACK, (
            "no more is left over than steps take"
        )


def test_memory_comes_back(wide: Path) -> None:
    with open_wide(wide, gpu_memory_utilization=0.5) as llm:  # whatever CUDA keeps for good, it has then
        run_in_full_size(llm)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    allocated = torch.cuda.memory_allocated()
    for _ in range(2):
        with open_wide(wide, gpu_memory_utilization=0.5) as llm:
            run_in_full_size(llm)
            assert torch.cuda.mem_get_info()[0] < free - 8 * SLACK
        assert torch.cuda.memory_allocated() < allocated + SLACK // 8
        assert torch.cuda.mem_get_info()[0] > free - SLACK // 4


def test_what_another_process_holds_is_not_taken(wide: Path) -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    held = int(0.6 * free)
    with another_process(held):
        with open_wide(wide, gpu_memory_utilization=0.9) as llm:
            assert 0 < pool_bytes(llm) < 0.9 * total - held
            run_in_full_size(llm)
        with pytest.raises(KVCacheTooSmall, match="gpu_memory_utilization"):
            open_wide(wide, gpu_memory_utilization=0.5)


def test_a_card_that_is_full_is_an_error_with_advice(wide: Path) -> None:
    """Almost nothing is left: a process would not even find the share that it was told it may use."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    with another_process(free - 3 * SLACK), pytest.raises(InvalidConfig):
        open_wide(wide, gpu_memory_utilization=0.9)
    with open_wide(wide, gpu_memory_utilization=0.5) as llm:
        run_in_full_size(llm)
