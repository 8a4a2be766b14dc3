"""The loop of decode attention: a few rows of queries look at tokens of one sequence, a tile of K and V after the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoengine.kernels.triton.attention.equal_splits import STEP
from nanoengine.kernels.triton.attention.paged_cache import dot, load_kv, softmax_part
from nanoengine.kernels.triton.tuning import Tuning

ROWS = 16
"""Rows that a program computes at least, a query head of a token each: the smallest tile that tensor cores multiply."""


@triton.jit
def seen(token, position, row_start, end, WINDOW: tl.constexpr):
    """Which tokens before `end` rows see, [rows or 1, tokens]; the arguments are those of `attend_range`."""
    if position is not None:
        visible = token[None, :] <= position[:, None]
        if WINDOW:
            visible &= token[None, :] >= row_start[:, None]
    else:
        visible = (token < end)[None, :]
    return visible


@triton.jit
def attend_range(
    acc,
    sums,
    highest,
    query,
    position,
    row_start,
    start,
    end,
    pages,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Attend to tokens `start` to `end` of a sequence: rows of one token to all of them, where there is no `position`; each of
    several to those from its `row_start` to its `position`.

    Args:
        acc, sums, highest: [ROWS, dimensions], [ROWS, TILE] and [ROWS] float32, what was found so far, and is returned: sums of V
            and of weights, relative to 2 to the power of `highest`. The sums of weights are summed up over the tile at the end
            alone: warps need no barrier for it.
        query: [ROWS, dimensions].
        pages: those of `load_kv`.
        scale: of scores; log2(e) is in it, for all exponentials and logarithms are of base 2.
    """
    dim = tl.arange(0, query.shape[1])
    # The compiler's pipeline runs over three loads: it has the block ids of a tile in shared memory before it loads the tile,
    # and loads that two rounds or more before it is used. So a loop of 3 + 2 n stages holds 1 + n tiles of K and of V.
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        visible = seen(token, position, row_start, end, WINDOW)
        token = tl.minimum(token, end - 1)  # an index beyond the end repeats the last token: no weight, but finite
        k, v = load_kv(pages, token, dim, query.dtype, HEAD_DIM, BLOCK_SIZE)
        scores = dot(query, tl.trans(k), tl.zeros(sums.shape, tl.float32))
        # Finite is the highest: LOWEST, or a tile holds at least one token.
        weights, shrink, highest = softmax_part(scores, visible, highest, scale, SOFT_CAP)
        sums = sums * shrink[:, None] + weights
        acc = dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return acc, sums, highest


def tile_shape(dtype: torch.dtype, head_dim: int, tuning: Tuning, *, int8: bool = False) -> tuple[int, int, int]:
    """Tokens in a tile, warps and stages. `tuning` means heads of 128; others have tiles of as many bytes, if they can.

    float32 is multiplied without tensor cores, to be exact: it wants threads, and does not wait for memory. What is dequantized
    for it takes so many registers that there are none for another tile.
    """
    if dtype is torch.float32:
        return 16, 8, 1 if int8 else 3
    tile = tuning.decode_tile * 128 // triton.next_power_of_2(head_dim)
    tile = max(16, min(tile, STEP))  # 16 is the least that tensor cores sum over
    return tile, tuning.decode_warps, tuning.decode_stages
