"""Paged attention in bfloat16 at the sizes of a real model, against float64; in small sizes without a GPU too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux on x86-64 alone")

from benchmarks.workload import lens_of_workload
from nanoengine.core.attention import AttentionSpec
from nanoengine.kernels.triton.attention.backend import TritonAttention
from tests.gpu.marks import needs_gpu
from tests.kernels.attention.paged import PLAIN, Heads, Pool, Sequences, assert_attended
from tests.kernels.formulas import DEVICE

PRODUCTION, SMALL = Heads(8, 2, 128), Heads(2, 2, 32)
BLOCK_SIZE = 16
MANY_ELEMENTS = 1 << 31

DECODES = {
    "one of 1,024": [1024],
    "one of 32,768, in many parts": [32_768],
    "64 of 2,048": [2048] * 64,
    "around the ends of blocks and parts": [1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1023, 1025, 4095, 4097, 8193],
    "a long one among short ones": [32_000, *range(1, 128)],
}
STEPS_OF_THE_WORKLOAD = (256, 131, 40)
"""So many sequences are decoded at once. Their lengths take a while to draw: not when tests are collected."""
PREFILLS = {
    "one of 1,024": ([1024], [1024]),
    "one of 4,096": ([4096], [4096]),
    "the end of 32,768": ([32_768], [256]),
    "a chunk after a history": ([8192, 700], [512, 700]),
    "many short ones": (list(range(1, 129)), list(range(1, 129))),
    "histories of all sizes": ([64 * i + 3 for i in range(1, 33)], list(range(1, 33))),
}
FEATURES = {
    "gpt-oss": (Heads(8, 8, 64), AttentionSpec(1.0, window=128, sinks=True)),
    "gpt-oss, every other layer": (Heads(8, 8, 64), AttentionSpec(1.0, sinks=True)),
    "Llama 4": (Heads(8, 5, 128), AttentionSpec(1.0, window=8192, chunked=True)),
    "Gemma 2": (Heads(8, 2, 256), AttentionSpec(1.0, window=4096, soft_cap=50.0)),
}


def check(
    heads: Heads,
    lens: list[int],
    query_lens: list[int],
    spec: AttentionSpec = PLAIN,
    num_blocks: int | None = None,
    *,
    drafted: bool = False,
) -> None:
    """The last tokens of each sequence attend to all up to them; decodes, if each has one or they are drafts."""
    starts = [n - count for n, count in zip(lens, query_lens, strict=True)]
    with DEVICE:
        sequences = Sequences(heads, BLOCK_SIZE, lens, torch.bfloat16, num_blocks=num_blocks)
        spec = replace(spec, scale=heads.dim**-0.5)
        pool = Pool(sequences, TritonAttention(BLOCK_SIZE), norms=False, rotated=False, spec=spec)
        pool.fill(starts)
        out = pool.step(len(lens) if drafted or max(query_lens) == 1 else 0, starts, lens)
        assert_attended(out, pool.exact(starts, lens), 4)
        if spec.window is None:
            written = sum(int(part.isfinite().sum()) for part in pool.memory.flatten().split(1 << 28))
            assert written == 2 * sum(lens) * heads.num * heads.dim, "nothing else is written"


LENS, QUERY_LENS = [1, 127, 129, 4097, 8192, 8193, 20_000], [1, 60, 129, 300, 100, 200, 99]


def ones(lens: list[int]) -> list[int]:
    return [1] * len(lens)


def drafts(lens: list[int]) -> list[int]:
    return [min(n, 1 + (i + 1) % 5) for i, n in enumerate(lens)]


WINDOWED = AttentionSpec(1.0, window=20, sinks=True, soft_cap=9.0)
SMALL_CASES = {
    "small decodes": (SMALL, PLAIN, [1, 17, 70], [1, 1, 1], False),
    "small drafts": (SMALL, WINDOWED, [1, 17, 33], [1, 3, 4], True),
    "small chunks": (SMALL, WINDOWED, [1, 17, 40], [1, 5, 40], False),
}
CASES = (
    {f"{name}, decoded": (PRODUCTION, PLAIN, lens, ones(lens), False) for name, lens in DECODES.items()}
    | {f"{name}, drafts": (PRODUCTION, PLAIN, lens, drafts(lens), True) for name, lens in DECODES.items()}
    | {f"{name}, chunks": (PRODUCTION, PLAIN, *lens, False) for name, lens in PREFILLS.items()}
    | {f"{name}, decoded": (*asked, LENS, ones(LENS), False) for name, asked in FEATURES.items()}
    | {f"{name}, drafts": (*asked, LENS, drafts(LENS), True) for name, asked in FEATURES.items()}
    | {f"{name}, chunks": (*asked, LENS, QUERY_LENS, False) for name, asked in FEATURES.items()}
)


@pytest.mark.parametrize(
    ("heads", "spec", "lens", "query_lens", "drafted"),
    [pytest.param(*case, id=name) for name, case in SMALL_CASES.items()]
    + [pytest.param(*case, marks=needs_gpu, id=name) for name, case in CASES.items()],
)
def test_steps_are_attention_by_its_definition(
    heads: Heads, spec: AttentionSpec, lens: list[int], query_lens: list[int], drafted: bool
) -> None:
    check(heads, lens, query_lens, spec, drafted=drafted)


@pytest.mark.parametrize("count", [pytest.param(count, marks=needs_gpu) for count in STEPS_OF_THE_WORKLOAD])
def test_decodes_of_a_step_of_the_workload(count: int) -> None:
    lens = lens_of_workload(count)
    check(PRODUCTION, lens, ones(lens))


@pytest.mark.parametrize(
    ("heads", "lens", "elements"),
    [
        pytest.param(SMALL, [1, 4], 40_000, id="small"),
        pytest.param(
            PRODUCTION, [1, 700, 4096, 33], MANY_ELEMENTS + (1 << 27), marks=needs_gpu, id="beyond 2^31 elements"
        ),
    ],
)
def test_blocks_near_the_end_of_a_large_pool(heads: Heads, lens: list[int], elements: int) -> None:
    """Their offsets do not fit 32 bits: writes and reads must find them, and nothing else may be written."""
    num_blocks = elements // (heads.num * BLOCK_SIZE * heads.dim)
    check(heads, lens, ones(lens), num_blocks=num_blocks)
    check(heads, lens, [max(1, n // 2) for n in lens], num_blocks=num_blocks)
