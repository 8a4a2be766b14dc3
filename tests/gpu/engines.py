"""Engines on the GPU, mixed requests for them, and what the CPU says to those."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from benchmarks.gpu.modes import MODES, Mode, modes_of
from nanoengine import LLM, SamplingParams
from tests.e2e.small_engine import assert_idle
from tests.support import fill_kv_with_nan, model_runner

DEVICE = "cuda"
VOCAB_SIZE = 300
MAX_LEN = 128
MODEL = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 3, "head_dim": 64, "tie_word_embeddings": False}
TINY_POOL = 28
"""Blocks of 16 tokens: too few for the requests below to run all at once."""

Tokens = list[list[list[int]]]
"""Of each request, of each of its completions."""


def open_llm(folder: Path, **options: Any) -> LLM:
    """An engine over a pool full of NaN. On a GPU its kernels are our own, unless
    others are asked for."""
    defaults: dict[str, Any] = {"dtype": "float32", "device": DEVICE, "max_model_len": MAX_LEN, "max_num_seqs": 16}
    if "gpu_memory_utilization" not in options:
        defaults["num_kv_blocks"] = 400
    llm = LLM(str(folder), use_tqdm=False, **defaults | options)
    runner = model_runner(llm)
    assert runner.kernels.name == options.get("kernels", "triton") or not runner.device.is_cuda
    fill_kv_with_nan(llm)
    return llm


def every_mode(llm: LLM) -> list[Mode]:
    """All modes on a GPU, where an engine that has recorded nothing is an error."""
    modes = modes_of(llm)
    assert modes == list(MODES) or not model_runner(llm).device.is_cuda
    return modes


def requests(count: int = 24, seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of many lengths, a third of which begin alike; greedy and drawn, with and without filters, single and threefold.

    No token hangs on a thread: noise of 1e-4 on every logit, ten times what float32 sums in another order make, changes none.
    """
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(70)]  # more than a block of any engine that must find them
    own = [[rng.randrange(VOCAB_SIZE) for _ in range(1 + (17 * i) % 50)] for i in range(count)]
    prompts = [shared * (i % 3 == 0) + tokens for i, tokens in enumerate(own)]
    hows: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 0.9, "top_p": 0.9, "n": 3},
        {"temperature": 1.2, "min_p": 0.05, "top_k": 50},
    ]
    params = [
        SamplingParams(ignore_eos=True, max_tokens=6 + i % 11, seed=seed + i, **hows[i % len(hows)])
        for i in range(count)
    ]
    return prompts, params


def generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> Tokens:
    """Run requests to their end; afterwards the engine must be idle, and every block back."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_idle(llm)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def on_cpu(folder: Path, prompts: list[list[int]], params: list[SamplingParams], **options: Any) -> Tokens:
    """What plain torch on the CPU answers, with room for all."""
    with open_llm(folder, device="cpu", kernels="torch", **options) as llm:
        return generate(llm, prompts, params)
