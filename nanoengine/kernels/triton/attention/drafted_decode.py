"""Attention of the last few tokens of each sequence, as of its drafts, over its paged K/V, cut into parts that run side by side.

A decode of one token each is `paged_decode`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.triton import dependent
from nanoengine.kernels.triton.attention.kv_int8 import NUMBERS_IN_SCALE
from nanoengine.kernels.triton.attention.paged_cache import (
    LOG2E,
    LOWEST,
    aligned,
    ask_for,
    cache_strides,
    first_seen,
    within,
)
from nanoengine.kernels.triton.attention.paged_walk import ROWS, tile_shape, walk
from nanoengine.kernels.triton.attention.split_kv import COMBINED, MAX_PARTS, Workspace, combine, part_size, split
from nanoengine.kernels.triton.launch import num_multiprocessors
from nanoengine.kernels.triton.tuning import Tuning

MOST_ROWS = 32
"""Rows that a program computes at most. Other tokens and heads are another program's, which finds K and V in the GPU's cache."""


@triton.jit
def _row(row, num_tokens, num_heads, HEADS: tl.constexpr):
    """Which token and which head of a lot a row is, and whether it is one of those that there are."""
    token, head = row // HEADS, row % HEADS
    return token, head, (token < num_tokens) & (head < num_heads)


@triton.jit(
    do_not_specialize=["table_stride", "to_fill", "longest_part", "most_parts"],  # they change from step to step
    do_not_specialize_on_alignment=["block_tables", "query_start_loc", "seq_lens"],
)
def _drafted_kernel(
    out,
    results,
    log_sums,
    arrivals,
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
    to_fill,
    longest_part,
    most_parts,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Program (i, j, p): part p of what is seen of sequence j, for the i-th lot of the rows that share a KV head.

    Rows of a lot are HEADS query heads of each of TOKENS tokens. A sequence has at most QUERIES tokens. `out` is [num_tokens,
    num_heads, HEAD_DIM].

    The only part of a sequence writes to `out`. One of several writes its rows to `results`, [num_seqs, lots, rows, most_parts,
    HEAD_DIM], and the logarithms of the sums of their weights to `log_sums`, both float32; the last of them to arrive, by the
    count of `arrivals`, combines them all. `scale` has log2(e) in it.
    """
    dependent.start(LAUNCH)
    HEAD_LOTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    DIMS: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    LOTS: tl.constexpr = HEAD_LOTS * ((QUERIES + TOKENS - 1) // TOKENS)
    ALIGNED: tl.constexpr = 16 // (k_cache.dtype.element_ty.primitive_bitwidth // 8)  # elements in 16 bytes
    Q_ALIGNED: tl.constexpr = 16 // (q.dtype.element_ty.primitive_bitwidth // 8)
    kv_head = tl.program_id(0) // LOTS
    first_head = tl.program_id(0) % HEAD_LOTS * HEADS
    first_query = tl.program_id(0) % LOTS // HEAD_LOTS * TOKENS
    seq = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    first_token = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - first_token
    first_token = (first_token + first_query).to(tl.int64)
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens + seq)
    seen = seq_len
    if WINDOW:
        seen = seq_len - first_seen(seq_len - query_len, WINDOW)
    size = part_size(seen, to_fill, longest_part, STEP)
    parts = tl.maximum(tl.cdiv(seen, size), 1)
    if part >= parts:
        return
    start = part * size
    if WINDOW:
        start += seq_len - seen
    end = tl.minimum(start + size, seq_len)

    head_start = tl.multiple_of(kv_head.to(tl.int64) * kv_head_stride, ALIGNED)
    k_head = tl.multiple_of(k_cache + head_start, 16)
    v_head = tl.multiple_of(v_cache + head_start, 16)
    table = block_tables + seq * table_stride
    # Lengths and tables are older than the embeddings of the step, which are launched behind everything before them: they may be
    # read before the wait. The query and K and V of new tokens are not, so that of K and V only a hint comes before.
    if LAUNCH:
        ask_for(k_head, v_head, table, start, end, block_stride, slot_stride, HEAD_DIM, BLOCK_SIZE, 64)
    dependent.wait(LAUNCH)

    row = tl.arange(0, ROWS)
    token_of, head_of, exists = _row(row, query_len - first_query, GROUP - first_head, HEADS)
    head = kv_head * GROUP + first_head + head_of
    dim = tl.arange(0, DIMS)
    # The launch has made sure of these multiples of 16 bytes. To know them makes loads wide, and those of K/V asynchronous.
    q_start = tl.multiple_of(q + first_token * q_token_stride, 16)
    q_place = head.to(tl.int64) * q_head_stride + token_of * q_token_stride
    q_place = tl.multiple_of(q_place, Q_ALIGNED)[:, None] + dim[None, :]
    there = within(exists, dim, HEAD_DIM)
    query = tl.load(q_start + q_place, mask=there, other=0.0)
    if k_scales is not None:
        k_scales += head_start // NUMBERS_IN_SCALE
        v_scales += head_start // NUMBERS_IN_SCALE

    # The earlier tokens may see nothing of a tile: then there is no score, and no weight.
    highest = tl.full([ROWS], LOWEST, tl.float32)
    sums = tl.zeros([ROWS, TILE], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    if sinks is not None:  # a weight without a value, which the first part counts for all
        sink = tl.load(sinks + head, mask=exists, other=0.0) * LOG2E
        highest = tl.where(part == 0, tl.maximum(sink, highest), highest)
        sums = tl.where((part == 0) & (tl.arange(0, TILE) == 0)[None, :], 1.0, sums)
    position = seq_len - query_len + first_query + token_of
    row_start = first_seen(position, WINDOW)
    acc, sums, highest = walk(
        acc, sums, highest, query, position, row_start, start, end, k_head, v_head, k_scales, v_scales, table, block_stride,
        slot_stride, scale, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, SOFT_CAP,
    )  # fmt: skip
    total = tl.sum(sums, axis=1)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # zeros, if the sequence is empty
    num_kv_heads = tl.num_programs(0) // LOTS
    out += ((first_token * num_kv_heads + kv_head) * GROUP + first_head) * HEAD_DIM
    if parts == 1:
        pointer = out + (token_of * num_kv_heads * GROUP + head_of)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(pointer, result.to(out.dtype.element_ty), mask=there)
    else:
        KEPT: tl.constexpr = TOKENS * HEADS
        lot = seq * tl.num_programs(0) + tl.program_id(0)
        results += lot * KEPT * most_parts * HEAD_DIM
        log_sums += lot * KEPT * most_parts
        index = row * most_parts + part
        tl.store(results + index[:, None] * HEAD_DIM + dim[None, :], result, mask=there)
        tl.store(log_sums + index, highest + tl.log2(total), mask=exists)
        # One thread counts for all: before it does, all have stored; then all see what others stored before they counted.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + lot, 1, sem="acq_rel", scope="gpu") == parts - 1:
            tl.store(arrivals + lot, 0)  # nobody else comes before the next launch
            kept = tl.arange(0, KEPT)
            its_token, its_head, wanted = _row(kept, query_len - first_query, GROUP - first_head, HEADS)
            place_of = (its_token * num_kv_heads * GROUP + its_head) * HEAD_DIM
            combine(out, place_of, wanted, results, log_sums, parts, most_parts, HEAD_DIM, KEPT, MAX_PARTS, AT_ONCE)


def drafted_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    workspace: Workspace,
    tuning: Tuning,
    query_start_loc: Tensor,
    max_query_len: int,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention of the last few tokens of each sequence, each over the tokens up to itself that it sees, in one launch.

    K and V are read once for all query heads that share them, and for as many tokens as make MOST_ROWS with these, with a running
    maximum (Dao et al., FlashAttention, 2022). Long sequences are cut into parts (Flash-Decoding, Dao et al., 2023), which the
    last program to end combines. How many parts there can be depends on shapes and `max_query_len` alone, so that a launch can
    be captured in a CUDA graph; how many there are, and how long, on the lengths: see `split_kv.split`.

    The earlier of the last tokens multiply V of the later ones by 0, so that V which is not finite spoils them all.

    Args are those of `paged_prefill`, where the new tokens are the last ones, and:
        workspace: of the engine; no other launch may use it at the same time.
        max_query_len: only a sequence of length 0 may have more tokens; those may get anything.
    """
    num_seqs, (_, num_heads, head_dim) = len(seq_lens), q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    q = aligned(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not len(q):
        return out
    tile, num_warps, num_stages = tile_shape(q.dtype, head_dim, tuning, int8=k_scales is not None)
    group = num_heads // num_kv_heads
    constants = _constants(group, max_query_len, head_dim, block_size, tile, tuning.launch(len(q)))
    heads, tokens, queries, step = (constants[name] for name in ("HEADS", "TOKENS", "QUERIES", "STEP"))
    num_lots = num_kv_heads * triton.cdiv(group, heads) * triton.cdiv(queries, tokens)
    longest = min([block_tables.shape[1] * block_size, *([abs(window) + queries - 1] if window else [])])
    cut = split(num_seqs * num_lots, longest, num_multiprocessors(q.device, 132), tuning, step)
    in_parts = cut.most_parts if cut.most_parts > 1 else 0
    rows = num_seqs * num_lots * tokens * heads
    results = torch.empty(rows, in_parts, head_dim, dtype=torch.float32, device=q.device)
    log_sums = torch.empty(rows, in_parts, dtype=torch.float32, device=q.device)
    _drafted_kernel[(num_lots, num_seqs, cut.most_parts)](
        out,
        results,
        log_sums,
        workspace.counters(num_seqs * num_lots, q.device),
        q,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        block_tables,
        query_start_loc,
        seq_lens,
        sinks,
        scale * math.log2(math.e),
        *q.stride()[:2],
        *cache_strides(k_cache, v_cache, k_scales, v_scales),
        block_tables.stride(0),
        *cut,
        **constants,
        WINDOW=window,
        SOFT_CAP=soft_cap or 0.0,
        num_warps=num_warps,
        num_stages=num_stages,
        # All that there are: the assembler would rather spill some. Of 8 warps it does not.
        maxnreg=None if num_warps == 8 else 255,
        **dependent.options(constants["LAUNCH"]),
    )
    return out


def _constants(
    group: int, max_query_len: int, head_dim: int, block_size: int, tile: int, launch: int
) -> dict[str, int]:
    """What the kernel is compiled for.

    There are as many tokens as fill its rows, so that there are few kernels. The results of a part are large: a part is so long
    that it reads eight times as many bytes, and who combines parts asks for many at once while registers last.
    """
    heads = triton.next_power_of_2(min(group, ROWS))
    queries = triton.next_power_of_2(max_query_len)
    rows = max(ROWS, min(heads * queries, MOST_ROWS))
    tokens = rows // heads
    queries = max(queries, tokens)
    combined = COMBINED * 4 * MOST_ROWS // rows
    return {
        "GROUP": group,
        "HEADS": heads,
        "TOKENS": tokens,
        "QUERIES": queries,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "ROWS": rows,
        "TILE": tile,
        "STEP": 8 * rows,
        "MAX_PARTS": MAX_PARTS,
        "AT_ONCE": max(1, combined // (tokens * heads * triton.next_power_of_2(head_dim))),
        "LAUNCH": launch,
    }
