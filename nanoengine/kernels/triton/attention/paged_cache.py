"""What the attention kernels share: how they want K, V and queries to lie, how they multiply, and what a layer may ask for."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.triton.attention.kv_int8 import NUMBERS_IN_SCALE, check_scales, dequantized

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

LOG2E = tl.constexpr(math.log2(math.e))
"""What makes an exponent of base e one of base 2."""

LOWEST = tl.constexpr(-1e38)
"""Far below any score and any logarithm of a sum of weights, but finite, so that differences are never NaN."""


class PagedCache(NamedTuple):
    """K and V of a layer, as kernels read and write them."""

    k: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], as V
    v: Tensor
    k_scales: Tensor | None = None  # those of an int8 cache: see `kv_int8.views`
    v_scales: Tensor | None = None


@triton.jit
def dot(a, b, acc):
    """a @ b + acc in float32, whatever the dtype of a and b."""
    if INTERPRETED:  # Triton's interpreter would multiply the bits of bfloat16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")  # float32 is not rounded to tf32


@triton.jit
def first_visible(position, WINDOW: tl.constexpr):
    """The first token that the token at a position sees, in a window of so many tokens; 0 is no limit, and windows of less than 0
    stand still: they begin at multiples of their size.
    """
    first = 0
    if WINDOW < 0:
        first = tl.maximum(position // -WINDOW * -WINDOW, first)
    elif WINDOW:
        first = tl.maximum(position - (WINDOW - 1), first)
    return first


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """CAP * tanh(score / CAP), where scores have log2(e) in them, before and after; 0 is no cap.

    tanh(x) = 1 - 2 / (exp(2 x) + 1) holds where the exponential is infinite, and where it is 0.
    """
    if CAP > 0:
        scores = (CAP * LOG2E) * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / CAP)) + 1.0))
    return scores


@triton.jit
def softmax_part(scores, visible, highest, scale, CAP: tl.constexpr):
    """Weights of a tile: 2 to the power of (scores * scale, capped, minus the highest of a row so far).

    The highest is taken of scores as they come: so an exponent is one multiplication with an addition.

    Args:
        scores: [rows, tokens] float32, products of queries and keys.
        visible: [rows, tokens], which of them count; None: all.
        highest: [rows] float32, of the tiles before, with the scale in it. Where no score of a row counts, it is finite.
        scale: above 0, with log2(e) in it.

    Returns:
        The weights; what sums of the tiles before are multiplied by, [rows]; the new highest, [rows].
    """
    if CAP > 0:
        scores, scale = capped(scores * scale, CAP), 1.0
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, axis=1) * scale)
    return tl.exp2(scores * scale - higher[:, None]), tl.exp2(highest - higher), higher


@triton.jit
def within(exists, dim, HEAD_DIM: tl.constexpr):
    """[rows, dimensions], or [rows, 1]: what there is of rows, in registers for a power of two of dimensions."""
    PADDED: tl.constexpr = dim.shape[0] > HEAD_DIM
    return exists[:, None] & (dim < HEAD_DIM)[None, :] if PADDED else exists[:, None]


@triton.jit
def load_heads(pointers, dim, HEAD_DIM: tl.constexpr):
    """Heads at pointers [rows, dimensions]; zeros beyond the head's dimensions."""
    PADDED: tl.constexpr = dim.shape[0] > HEAD_DIM
    return tl.load(pointers, mask=(dim < HEAD_DIM)[None, :], other=0) if PADDED else tl.load(pointers)


@triton.jit
def cache_of_head(k_cache, v_cache, k_scales, v_scales, kv_head, stride):
    """Where K and V of a head begin, and the scales of both; without scales, those pointers mean nothing.

    The launch has made sure of these multiples of 16 bytes. To know them makes loads wide, and those of K/V asynchronous.
    """
    ALIGNED: tl.constexpr = 16 // (k_cache.dtype.element_ty.primitive_bitwidth // 8)  # elements in 16 bytes
    start = tl.multiple_of(kv_head.to(tl.int64) * stride, ALIGNED)
    k_head = tl.multiple_of(k_cache + start, 16)
    v_head = tl.multiple_of(v_cache + start, 16)
    k_scales_head, v_scales_head = k_head, v_head
    if k_scales is not None:
        k_scales_head = k_scales + start // NUMBERS_IN_SCALE
        v_scales_head = v_scales + start // NUMBERS_IN_SCALE
    return k_head, v_head, k_scales_head, v_scales_head


@triton.jit
def load_kv(pages, token, dim, dtype: tl.constexpr, HEAD_DIM, BLOCK_SIZE: tl.constexpr):
    """K and V of tokens of a sequence, in a dtype: [tokens, dimensions] each.

    Args:
        pages: of a head in a sequence: (what `cache_of_head` returns, the block table, the strides of blocks and slots).
    """
    head, table, block_stride, slot_stride = pages
    k_head, v_head, k_scales, v_scales = head
    ALIGNED: tl.constexpr = 16 // (k_head.dtype.element_ty.primitive_bitwidth // 8)  # elements in 16 bytes
    block = tl.load(table + token // BLOCK_SIZE).to(tl.int64)  # times the stride it may not fit 32 bits
    offset = tl.multiple_of(block * block_stride + token % BLOCK_SIZE * slot_stride, ALIGNED)[:, None] + dim[None, :]
    k = load_heads(k_head + offset, dim, HEAD_DIM)
    v = load_heads(v_head + offset, dim, HEAD_DIM)
    if k_head.dtype.element_ty == tl.int8:
        scale_offset = block * (block_stride // NUMBERS_IN_SCALE) + token % BLOCK_SIZE
        k = dequantized(k, tl.load(k_scales + scale_offset), dtype)
        v = dequantized(v, tl.load(v_scales + scale_offset), dtype)
    return k, v


@triton.jit
def ask_for(pages, start, end, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """Ask for K and V of the first TOKENS tokens from `start` on: they come into the L2 cache, and nothing is read (compute
    capability 9.0 and later).
    """
    head, table, block_stride, slot_stride = pages
    k_head, v_head, _, _ = head
    BYTES: tl.constexpr = HEAD_DIM * k_head.dtype.element_ty.primitive_bitwidth // 8
    if not INTERPRETED and start < end:
        i = tl.arange(0, 2 * TOKENS)
        token = tl.minimum(start + i % TOKENS, end - 1)
        block = tl.load(table + token // BLOCK_SIZE).to(tl.int64)
        pointers = tl.where(i < TOKENS, k_head, v_head) + block * block_stride + token % BLOCK_SIZE * slot_stride
        hint: tl.constexpr = f"cp.async.bulk.prefetch.L2.global [$1], {BYTES}; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(hint, "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1)


def aligned(q: Tensor) -> Tensor:
    """Queries [rows, heads, head_dim] as they are, or if a head is not one piece at a multiple of 16 bytes, a copy of them."""
    ragged = q.stride(2) != 1 or any(stride * q.element_size() % 16 for stride in q.stride()[:2]) or q.data_ptr() % 16
    return q.clone(memory_format=torch.contiguous_format) if ragged else q


def cache_strides(cache: PagedCache) -> tuple[int, int, int]:
    """How many elements apart are blocks, slots and heads, in K and in V.

    Raises:
        ValueError: K and V differ in it, or a head of a token is not in one piece that starts at a multiple of 16 bytes.
    """
    k_cache, v_cache, k_scales, v_scales = cache
    strides = k_cache.stride()
    if v_cache.stride() != strides:
        raise ValueError(f"K has strides {strides}, V has {v_cache.stride()}: they must be the same")
    if strides[3] != 1 or any(stride * k_cache.element_size() % 16 for stride in strides[:3]):
        raise ValueError(f"a cache of strides {strides} does not hold every head of a token at a multiple of 16 bytes")
    if k_cache.data_ptr() % 16 or v_cache.data_ptr() % 16:
        raise ValueError("a cache does not start at a multiple of 16 bytes")
    if k_scales is not None and v_scales is not None:
        check_scales(k_cache, k_scales)
        check_scales(v_cache, v_scales)
    return strides[0], strides[1], strides[2]
