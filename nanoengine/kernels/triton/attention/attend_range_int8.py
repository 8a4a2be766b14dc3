"""The loop of decode attention over K and V of 8 bits, with few instructions a number. Queries are bfloat16.

A row of K or V is read as pairs of numbers, so that matrix loads take it from shared memory to where tensor cores want it. There
pairs become bfloat16, which holds them exactly; the scales multiply scores and weights, of which there are fewer. The two numbers
of a pair end up in different registers, so even and odd dimensions are multiplied one after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.triton.attention.attend_range import seen
from nanoengine.kernels.triton.attention.equal_splits import STEP
from nanoengine.kernels.triton.attention.kv_int8 import NUMBERS_IN_SCALE
from nanoengine.kernels.triton.attention.paged_cache import INTERPRETED, capped, dot, load_heads
from nanoengine.kernels.triton.tuning import Tuning

SPLIT_PAIRS = tl.constexpr(
    """{
    .reg .b32 upper, low, sign, upper_low, upper_sign, minus;
    mov.b32 minus, 0xbf80bf80;
    shr.u32 upper, $2, 8;
    lop3.b32 low, $2, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 sign, $2, 0x00800080, 0x43004300, 0xea;
    lop3.b32 upper_low, upper, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 upper_sign, upper, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, sign, minus, low;
    fma.rn.bf16x2 $1, upper_sign, minus, upper_low;
    }"""
)
"""Two pairs at once. In bfloat16 0x4300 is 128, and its last 7 bits count ones: with those of a number n it is 128 + (n & 127),
with the sign bit of n, which is the lowest of the exponent there, 128 or 256. The difference is n. The operation 0xea is
(a & b) | c, and 0xbf80 is -1. Results come last: one may be in the register of the pairs."""

LEAST_HEAD = 64
"""Numbers of a head: smaller ones take so many registers that some are spilled."""


@triton.jit
def split_pairs(pairs):
    """The first and the second number of each pair (int16, the first in the low byte), in bfloat16."""
    if INTERPRETED:
        return ((pairs << 8) >> 8).to(tl.float32).to(tl.bfloat16), (pairs >> 8).to(tl.float32).to(tl.bfloat16)
    return tl.inline_asm_elementwise(
        SPLIT_PAIRS, "=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
    )


@triton.jit
def even_and_odd(rows):
    """Rows [n, size] as two [n, size / 2]."""
    return tl.split(tl.reshape(rows, [rows.shape[0], rows.shape[1] // 2, 2]))


@triton.jit
def attend_range_int8(
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
    """As `attend_range`, from the same arguments. Rounding differs: K and V are not rounded, and softmax weights are rounded with
    the scale of V in them.
    """
    PAIR: tl.constexpr = tl.pointer_type(tl.int16)
    SCALE: tl.constexpr = tl.pointer_type(tl.float32)
    cache_head, table, block_stride, slot_stride = pages
    k_head, v_head, k_scales, v_scales = cache_head
    q_even, q_odd = even_and_odd(query)
    even, odd = even_and_odd(acc)
    k_scales, v_scales = k_scales.to(k_head.dtype), v_scales.to(v_head.dtype)
    pair = tl.arange(0, query.shape[1] // 2)
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        visible = seen(token, position, row_start, end, WINDOW)
        # As in `attend_range`. All of these are unsigned and bytes, which takes the fewest instructions.
        token = tl.minimum(token, end - 1).to(tl.uint32)
        slot, stride = token % BLOCK_SIZE, tl.cast(block_stride, tl.uint32).to(tl.uint64)
        block = tl.load(table + token // BLOCK_SIZE).to(tl.uint32).to(tl.uint64) * stride
        offset = tl.multiple_of(block + slot * tl.cast(slot_stride, tl.uint32), 16)
        k = load_heads((k_head + offset).to(PAIR)[:, None] + pair[None, :], pair, HEAD_DIM // 2)
        v = load_heads((v_head + offset).to(PAIR)[:, None] + pair[None, :], pair, HEAD_DIM // 2)
        offset = block + slot * NUMBERS_IN_SCALE
        k_scale = tl.load((k_scales + offset).to(SCALE))
        v_scale = tl.load((v_scales + offset).to(SCALE))
        k_even, k_odd = split_pairs(tl.trans(k))
        scores = dot(q_odd, k_odd, dot(q_even, k_even, tl.zeros(sums.shape, tl.float32)))
        scores = capped(scores * (k_scale * scale)[None, :], SOFT_CAP)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        shrink = tl.exp2(highest - higher)[:, None]
        weights = tl.exp2(scores - higher[:, None])
        sums = sums * shrink + weights
        weights = (weights * v_scale[None, :]).to(query.dtype)
        v_even, v_odd = split_pairs(v)
        even = dot(weights, v_even, even * shrink)
        odd = dot(weights, v_odd, odd * shrink)
        highest = higher
    return tl.reshape(tl.join(even, odd), acc.shape), sums, highest


def pair_tile(q: Tensor, k_cache: Tensor, tuning: Tuning) -> int:
    """Tokens in a tile of `attend_range_int8`; 0 where `attend_range` attends to such queries and keys."""
    size, head_dim = tuning.int8_pair_tile, q.shape[2]
    if not size or k_cache.dtype is not torch.int8 or q.dtype is not torch.bfloat16 or head_dim < LEAST_HEAD:
        return 0
    return max(16, min(size, STEP, size * 128 // triton.next_power_of_2(head_dim)))
