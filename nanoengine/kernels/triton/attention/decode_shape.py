"""What a program of decode attention computes, and how many programs a multiprocessor has room for."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nanoengine.kernels.triton.attention.attend_range import ROWS
from nanoengine.kernels.triton.attention.equal_splits import STEP
from nanoengine.kernels.triton.tuning import Tuning

MOST_ROWS = 32
"""Rows that a program computes at most. Other tokens and heads are another program's, which finds K and V in the GPU's cache."""

COMBINED = 512
"""Numbers of parts' results that a warp combines at once: 16 in every thread, and registers are left for the addresses."""

REGISTERS = 1 << 16
"""Of a multiprocessor. Programs that do not run side by side with the others would begin when those end."""

RESERVED = 1 << 10
"""Bytes of shared memory that CUDA takes for every program."""


class Shape(NamedTuple):
    """What a program computes: a lot of the rows of a KV head and of a sequence.

    Args:
        heads: query heads of a lot, a power of two.
        tokens: of a lot.
        query_lots: lots that hold all new tokens of a sequence, for the same heads.
        rows: for tensor cores, as many as these or more.
        side_by_side: programs of a multiprocessor.
        registers: of a thread, at most.
        step: tokens of a unit of splits: a part of many rows reads eight times as many bytes as its results have.
        at_once: parts whose results are combined at once.
    """

    heads: int
    tokens: int
    query_lots: int
    rows: int
    side_by_side: int
    registers: int
    step: int
    at_once: int


def decode_shape(
    q: Tensor,
    k_cache: Tensor,
    max_query_len: int | None,
    tile: int,
    num_warps: int,
    num_stages: int,
    tuning: Tuning,
    *,
    pairs: bool,
) -> Shape:
    """There are as many tokens in a lot as fill its rows, so that there are few kernels.

    Args:
        q, k_cache: of `paged_decode`.
        max_query_len: most tokens of a sequence; none: all have one, and so has a lot.
        pairs: the program reads numbers of 8 bits in pairs.
    """
    group, dims, size = q.shape[1] // k_cache.shape[2], triton.next_power_of_2(q.shape[2]), k_cache.element_size()
    heads, tokens, query_lots, step = triton.next_power_of_2(min(group, ROWS)), 1, 1, STEP
    if max_query_len is not None:
        queries = triton.next_power_of_2(max_query_len)
        most_rows = ROWS if size == 1 or dims > 128 else MOST_ROWS  # more would take too many registers
        tokens = max(ROWS, min(heads * queries, most_rows)) // heads
        query_lots = max(1, queries // tokens)
        step = 8 * heads * tokens
    rows = max(ROWS, heads * tokens)
    # Those of float32 have twice as many warps, numbers of 8 bits are dequantized in registers, and many rows, long tiles and
    # several tokens take more of them: fewer programs have registers.
    count = tuning.decode_programs_per_sm
    if q.dtype is torch.float32 or (size > 1 and rows > ROWS):
        count //= 2
    elif size == 1:
        count = tuning.int8_programs_per_sm
        if dims != 128 or max_query_len is not None:
            count = min(count, 3 if pairs else 2)
    elif tile > 32 or max_query_len is not None:
        count = count * 3 // 4
    # Shared memory holds the tiles of K and V that are on their way, the query, block ids and scales; Triton 3.6 takes just that.
    tiles = 2 * tile * dims * size * ((num_stages - 3) // 2 + 1)
    beside = rows * dims * q.element_size() + tile * (68 if size == 1 else 44) + RESERVED
    count = max(1, min(count, _shared_memory(q.device) // (tiles + beside)))
    registers = min(255, REGISTERS // (32 * num_warps * count) // 8 * 8)
    # Where registers are left for more, twice as many; those of a group of one head are not, and its parts are few.
    is_wide = max_query_len is not None and registers > 128 and heads > 1
    combined = COMBINED * num_warps * (2 if is_wide else 1)
    return Shape(heads, tokens, query_lots, rows, count, registers, step, max(1, combined // (heads * tokens * dims)))


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a multiprocessor has; for the interpreter those of an H100."""
    if device.type != "cuda":
        return 228 << 10
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)
