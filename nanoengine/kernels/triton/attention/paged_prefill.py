"""Causal attention of the new tokens of each sequence over its paged K/V, whatever part of it was there before.

It knows block tables and lengths. Whose tokens they are, and how the cache came to be filled, it does not know.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.core.attention import AttentionSpec, Runs
from nanoengine.kernels.attention import window_of
from nanoengine.kernels.triton.attention.paged_cache import (
    LOG2E,
    LOWEST,
    PagedCache,
    aligned,
    cache_of_head,
    cache_strides,
    dot,
    first_visible,
    load_heads,
    load_kv,
    softmax_part,
    within,
)
from nanoengine.kernels.triton.tuning import Tuning

MOST_HEADS = 16
"""Most query heads of a group that share a tile; a larger group takes several tiles."""


@triton.jit
def _attend_range(
    acc,
    total,
    highest,
    query,
    position,
    start,
    end,
    pages,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to tokens `start` to `end`. Unless MASKED, those are whole tiles, and every row sees them all."""
    dim = tl.arange(0, query.shape[1])
    # In shared memory are, in turn, the block ids of a tile, K and V: the compiler's pipeline runs over all three, and a
    # loop of 5 stages has two tiles there.
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        visible = token[None, :] <= position[:, None]
        if MASKED and WINDOW:
            visible &= token[None, :] >= first_visible(position, WINDOW)[:, None]
        if MASKED:
            token = tl.minimum(token, end - 1)  # an index beyond the end repeats the last token: no weight, but finite
        k, v = load_kv(pages, token, dim, query.dtype, HEAD_DIM, BLOCK_SIZE)
        scores = dot(query, tl.trans(k), tl.zeros([ROWS, TILE], tl.float32))
        # Finite is the highest: LOWEST, or every row sees the first token.
        weights, shrink, highest = softmax_part(scores, visible if MASKED else None, highest, scale, SOFT_CAP)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return acc, total, highest


# The stride changes from step to step; where the sequences begin in lists that others lead, from batch to batch.
@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["block_tables", "query_start_loc", "seq_lens"]
)
def _prefill_kernel(
    out,
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    block_tables,
    query_start_loc,
    seq_lens,
    sinks,
    scale,
    q_token_stride,
    q_head_stride,
    block_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Program (i, j, t): in sequence j, tile t from the end, for the i-th lot of HEADS query heads that share a KV head.

    A tile has ROWS rows: HEADS of each of its tokens. `scale` has log2(e) in it: all exponentials are of base 2.
    """
    LOTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    Q_ALIGNED: tl.constexpr = 16 // (q.dtype.element_ty.primitive_bitwidth // 8)
    TOKENS: tl.constexpr = ROWS // HEADS
    kv_head = tl.program_id(0) // LOTS
    seq = tl.program_id(1).to(tl.int64)
    start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - start
    first = (tl.num_programs(2) - 1 - tl.program_id(2)) * TOKENS  # the late ones see most, and so they begin
    if first >= query_len:
        return

    seq_len = tl.load(seq_lens + seq)
    row = tl.arange(0, ROWS)
    token = first + row // HEADS
    in_group = (tl.program_id(0) % LOTS) * HEADS + row % HEADS
    dim = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    # The launch has made sure of these multiples of 16 bytes. To know them makes loads wide.
    q_start = tl.multiple_of(q + start.to(tl.int64) * q_token_stride, 16)
    q_token = tl.minimum(token, query_len - 1)  # rows beyond the last token or head repeat it, and are not stored
    q_head = kv_head * GROUP + tl.minimum(in_group, GROUP - 1)
    q_offset = tl.multiple_of(q_token.to(tl.int64) * q_token_stride + q_head * q_head_stride, Q_ALIGNED)
    query = load_heads(q_start + q_offset[:, None] + dim[None, :], dim, HEAD_DIM)
    cache_head = cache_of_head(k_cache, v_cache, k_scales, v_scales, kv_head, kv_head_stride)
    pages = (cache_head, block_tables + seq * table_stride, block_stride, slot_stride)

    history = seq_len - query_len
    position = history + q_token
    seen = tl.minimum(history + first + TOKENS, seq_len)
    acc = tl.zeros([ROWS, dim.shape[0]], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    highest = tl.full([ROWS], LOWEST if WINDOW else float("-inf"), tl.float32)
    if sinks is not None:  # a weight without a value
        highest = tl.maximum(tl.load(sinks + q_head) * LOG2E, LOWEST)
        total += 1.0
    # What all rows see needs no mask. Before it is, in a window, what the later rows do not see any more.
    if WINDOW:
        earliest = first_visible(history + first, WINDOW)
        lost = first_visible(seen - 1, WINDOW) - earliest
        seen_by_all = tl.minimum(earliest + tl.cdiv(lost, TILE) * TILE, seen)
        acc, total, highest = _attend_range(
            *(acc, total, highest, query, position, earliest, seen_by_all, pages, scale),
            *(HEAD_DIM, BLOCK_SIZE, ROWS, TILE, WINDOW, SOFT_CAP, True),
        )
        first_masked = seen_by_all + tl.maximum(history + first + 1 - seen_by_all, 0) // TILE * TILE
    else:
        seen_by_all = 0
        first_masked = tl.maximum(history + first + 1, 0) // TILE * TILE
    acc, total, highest = _attend_range(
        *(acc, total, highest, query, position, seen_by_all, first_masked, pages, scale),
        *(HEAD_DIM, BLOCK_SIZE, ROWS, TILE, WINDOW, SOFT_CAP, False),
    )
    acc, total, highest = _attend_range(
        *(acc, total, highest, query, position, first_masked, seen, pages, scale),
        *(HEAD_DIM, BLOCK_SIZE, ROWS, TILE, WINDOW, SOFT_CAP, True),
    )
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # zeros, if the sequence is empty
    num_heads = tl.num_programs(0) // LOTS * GROUP
    out_row = (start + token).to(tl.int64) * num_heads + kv_head * GROUP + in_group
    present = (token < query_len) & (in_group < GROUP)
    offset = out_row[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=within(present, dim, HEAD_DIM))


def paged_prefill(
    q: Tensor, cache: PagedCache, runs: Runs, spec: AttentionSpec, sinks: Tensor | None, tuning: Tuning
) -> Tensor:
    """Attention of the last tokens of each sequence, each over the tokens up to itself that it sees.

    FlashAttention-2 (Dao, 2023), with the query heads that share K and V side by side in a tile, as if they were tokens.

    Args:
        q: [num_tokens, num_heads, head_dim], head_dim a multiple of 16 up to 256: the new tokens of all sequences.
        cache: of the dtype of q or int8: see `paged_cache.cache_strides`. A block_size is a power of two. The new tokens are
            in it.
        runs: a sequence of length 0 has zeros for results. Block tables may have gaps between rows; what stands before the first
            visible token of a window is not read.
        spec: a scale above 0.
        sinks: [num_heads] float32, contiguous: one more score for each head, which takes weight and has no value, and no cap.
        tuning: how 16-bit numbers are computed.

    Returns:
        [num_tokens, num_heads, head_dim], of the dtype of q; sums are float32.

    Raises:
        ValueError: the cache does not lie as the kernel reads it.
    """
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = cache.k.shape[1:3]
    strides = cache_strides(cache)
    q = aligned(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    group = num_heads // num_kv_heads
    heads = min(triton.next_power_of_2(group), MOST_HEADS)
    is_short = runs.longest <= tuning.short_prompt
    shape = _shape(q.dtype, head_dim, int8=cache.k_scales is not None, is_short=is_short, tuning=tuning)
    tiles = triton.cdiv(runs.longest, shape["ROWS"] // heads)
    _prefill_kernel[(num_kv_heads * triton.cdiv(group, heads), len(runs.seq_lens), tiles)](
        *(out, q, *cache, runs.block_tables, runs.query_start_loc, runs.seq_lens, sinks),
        *(spec.scale * math.log2(math.e), *q.stride()[:2], *strides, runs.block_tables.stride(0)),
        GROUP=group,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window_of(spec),
        SOFT_CAP=spec.soft_cap or 0.0,
        **shape,
    )
    return out


def _shape(dtype: torch.dtype, head_dim: int, *, int8: bool, is_short: bool, tuning: Tuning) -> dict[str, int]:
    """Rows and tokens in a tile, warps, stages, a limit of registers: what fits 163 KB of shared memory (A100), without spills.

    Short prompts have few tiles: smaller ones are work for more multiprocessors, two of them for each. With 32 tokens in a tile,
    one multiprocessor has two programs of 128 rows, or three of 64.

    float32 is multiplied without tensor cores, to be exact; its small tiles are for the compiler, which unrolls all of one.
    An int8 tile passes through registers on its way: there is room for fewer rows, and in float32 for no tile ahead of its turn.
    """
    rows, tile, warps, stages, registers = 64 if int8 else 128, 64, 8, 5, 0
    if dtype is torch.float32:
        rows, tile, stages = 32, 16, 1 if int8 else 3
    elif head_dim > 128:
        rows, tile = 64, 32
    elif is_short and not int8:
        rows, tile, warps, stages, registers = (64, 32, 4, 5, 168) if tuning.short_tile == 32 else (64, 64, 4, 4, 0)
    elif not int8 and tuning.prefill_tile == 32:
        tile, registers = 32, 128
    limit = {"maxnreg": registers} if registers else {}
    return {"ROWS": rows, "TILE": tile, "num_warps": warps, "num_stages": stages, **limit}
