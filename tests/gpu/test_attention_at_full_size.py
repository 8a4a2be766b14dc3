"""Paged attention in bfloat16 at the sizes of a real model, against float64; in small sizes without a GPU too."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux on x86-64 alone")

from benchmarks.gpu.kernel_bench import lens_of_workload
from nanoengine.core.attention import AttentionSpec
from tests.attention.paged import Heads
from tests.gpu.full_size import BLOCK_SIZE, PRODUCTION, SMALL, PagedMemory
from tests.gpu.marks import needs_gpu

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
    "Gemma 2": (Heads(8, 2, 256), AttentionSpec(1.0, window=4096, soft_cap=50.0)),
}


@pytest.mark.parametrize(
    ("heads", "lens"),
    [
        pytest.param(SMALL, [1, 17, 70], id="small"),
        *(pytest.param(PRODUCTION, lens, marks=needs_gpu, id=name) for name, lens in DECODES.items()),
    ],
)
def test_decodes(heads: Heads, lens: list[int]) -> None:
    PagedMemory(heads, lens).check([1] * len(lens))


@pytest.mark.parametrize("count", [pytest.param(count, marks=needs_gpu) for count in STEPS_OF_THE_WORKLOAD])
def test_decodes_of_a_step_of_the_workload(count: int) -> None:
    PagedMemory(PRODUCTION, lens_of_workload(count)).check([1] * count)


@pytest.mark.parametrize(
    ("heads", "lens", "query_lens"),
    [
        pytest.param(SMALL, [1, 17, 40], [1, 5, 40], id="small"),
        *(pytest.param(PRODUCTION, *lens, marks=needs_gpu, id=name) for name, lens in PREFILLS.items()),
    ],
)
def test_prefills(heads: Heads, lens: list[int], query_lens: list[int]) -> None:
    PagedMemory(heads, lens).check(query_lens)


@pytest.mark.parametrize(
    ("heads", "spec", "lens", "query_lens"),
    [
        pytest.param(SMALL, AttentionSpec(1.0, 20, True, 9.0), [1, 17, 60], [1, 5, 40], id="small"),
        *(
            pytest.param(
                *feature,
                [1, 127, 129, 4097, 8192, 8193, 20_000],
                [1, 60, 129, 300, 100, 200, 99],
                marks=needs_gpu,
                id=name,
            )
            for name, feature in FEATURES.items()
        ),
    ],
)
def test_windows_sinks_and_soft_caps(heads: Heads, spec: AttentionSpec, lens: list[int], query_lens: list[int]) -> None:
    memory = PagedMemory(heads, lens, spec=spec)
    memory.check([1] * len(lens))
    memory.check(query_lens)


@pytest.mark.parametrize(
    ("heads", "lens", "elements"),
    [
        pytest.param(SMALL, [3, 20], 40_000, id="small"),
        pytest.param(
            PRODUCTION, [1, 700, 4096, 33], MANY_ELEMENTS + (1 << 27), marks=needs_gpu, id="beyond 2^31 elements"
        ),
    ],
)
def test_blocks_near_the_end_of_a_large_pool(heads: Heads, lens: list[int], elements: int) -> None:
    """Their offsets do not fit 32 bits: writes and reads must find them, and nothing else may be written."""
    memory = PagedMemory(heads, lens, num_blocks=elements // (heads.num * BLOCK_SIZE * heads.dim))
    needed = sum(-(-n // BLOCK_SIZE) for n in lens)
    first = int(memory.tables[memory.tables > 0].min())
    assert first == memory.num_blocks - needed
    for cache, values in zip(memory.caches, (memory.k, memory.v), strict=True):
        written = sum(int(part.isfinite().sum()) for part in cache.flatten().split(1 << 28))
        assert written == sum(lens) * heads.num * heads.dim
        for i, value in enumerate(values):
            slots = memory.slots(i)
            assert torch.equal(cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE], value)
    memory.check([1] * len(lens))
    memory.check([max(1, n // 2) for n in lens])
