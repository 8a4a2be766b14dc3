"""Attention of the last token of each sequence, or of the last few, over paged K/V: all programs read equally many tokens.

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
from nanoengine.kernels.triton import dependent
from nanoengine.kernels.triton.attention.attend_range import attend_range, tile_shape
from nanoengine.kernels.triton.attention.attend_range_int8 import attend_range_int8, pair_tile
from nanoengine.kernels.triton.attention.decode_shape import decode_shape
from nanoengine.kernels.triton.attention.equal_splits import combine_splits, part_of, plan_splits
from nanoengine.kernels.triton.attention.paged_cache import (
    LOG2E,
    LOWEST,
    PagedCache,
    aligned,
    ask_for,
    cache_of_head,
    cache_strides,
    first_visible,
    within,
)
from nanoengine.kernels.triton.launch import num_multiprocessors
from nanoengine.kernels.triton.tuning import Tuning
from nanoengine.kernels.triton.workspace import Workspace


@triton.jit
def _queries_of(query_start_loc, seq, first_query):
    """Token `first_query` of a sequence among the new tokens of all, and how many it has from there on; 0 or less is none."""
    first_token, count = seq, 1
    if query_start_loc is not None:
        start, end = tl.load(query_start_loc + seq), tl.load(query_start_loc + seq + 1)
        first_token, count = (start + first_query).to(tl.int64), end - start - first_query
    return first_token, count


@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["block_tables", "query_start_loc", "seq_lens"]
)
def _decode_kernel(
    out,
    results,
    log_sums,
    arrivals,
    plan,
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
    TOKENS: tl.constexpr,
    QUERY_LOTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PAIRS: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Program (i, j): split j of all tokens, for the i-th lot of the rows that share a KV head.

    Rows of a lot are HEADS query heads of each of TOKENS tokens; QUERY_LOTS of them hold all new tokens of a sequence, which is
    one if there is no `query_start_loc`. `out` is [num_tokens, num_heads, HEAD_DIM].

    The split that reads all of a sequence writes to `out`. Others write their rows to `results`, [lots, 2 * splits, rows,
    HEAD_DIM], at `part_of`, and the logarithms of the sums of their weights to `log_sums`, both float32; the last of them to
    arrive, by the count of `arrivals`, [lots, splits], combines them all. `scale` has log2(e) in it.
    """
    dependent.start(LAUNCH)
    DIMS: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    KEPT: tl.constexpr = TOKENS * HEADS
    HEAD_LOTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    LOTS: tl.constexpr = HEAD_LOTS * QUERY_LOTS
    Q_ALIGNED: tl.constexpr = 16 // (q.dtype.element_ty.primitive_bitwidth // 8)
    lot, split = tl.program_id(0), tl.program_id(1)
    num_splits, num_heads = tl.num_programs(1), tl.num_programs(0) // LOTS * GROUP
    kv_head, first_head = lot // LOTS, lot % HEAD_LOTS * HEADS
    first_query = lot % LOTS // HEAD_LOTS * TOKENS
    results += lot.to(tl.int64) * (2 * num_splits * KEPT * HEAD_DIM)
    log_sums += lot * (2 * num_splits * KEPT)

    # Where this split begins, and where the next one does: see `plan_splits`.
    size = num_splits + 1
    entry = plan + split
    first_seq, last_seq = tl.load(entry), tl.load(entry + 1)
    start, stop = tl.load(entry + size), tl.load(entry + size + 1)
    seq_len = tl.load(entry + 2 * size)
    first_split, next_first_split = tl.load(entry + 3 * size), tl.load(entry + 3 * size + 1)
    parts, next_parts = tl.load(entry + 4 * size), tl.load(entry + 4 * size + 1)
    is_cut = next_first_split <= split  # the last sequence goes on in the next split
    end_seq = tl.where(is_cut, last_seq + 1, last_seq)

    cache_head = cache_of_head(k_cache, v_cache, k_scales, v_scales, kv_head, kv_head_stride)
    # Tables and lengths are older than the embeddings of the step, which are launched behind everything before them. The plan
    # is older than this kernel in the layer before, which lets others start behind its wait only; the layer that plans
    # launches it plainly. So all of these may be read before the wait. The query, and K and V of new tokens, may not: of K and
    # V only a hint comes before.
    if LAUNCH:
        table = block_tables + first_seq.to(tl.int64) * table_stride
        end = tl.where(first_seq == last_seq, stop, seq_len)
        ask_for((cache_head, table, block_stride, slot_stride), start, end, HEAD_DIM, BLOCK_SIZE, 64)
    dependent.wait(LAUNCH)

    row, dim = tl.arange(0, ROWS), tl.arange(0, DIMS)
    token_of, head_of = row // HEADS, row % HEADS
    head = kv_head * GROUP + first_head + head_of
    # Values that are equal for all sequences are computed again for each: they would take too many registers.
    for seq in tl.range(first_seq, end_seq, num_stages=1, disable_licm=True):
        next_len = tl.load(seq_lens + seq + 1, mask=seq + 1 < end_seq, other=0)  # long before its use
        is_first = (seq > first_seq) | (first_split == split)  # the split that has the first tokens of the sequence
        is_last = (seq < last_seq) | (is_cut == 0)  # the one that has its last token
        first_token, count = _queries_of(query_start_loc, tl.cast(seq, tl.int64), first_query)
        exists = (token_of < count) & (head_of < GROUP - first_head)
        there = within(exists, dim, HEAD_DIM)
        # Not carried over from the sequence before: Triton 3.6 takes what an outer loop carries for a constant, where nothing but
        # the bounds of an inner loop use it.
        begin = first_visible(seq_len - count - first_query, WINDOW) if WINDOW else 0
        begin = tl.where(seq == first_seq, start, begin)
        end = tl.where(is_last, seq_len, stop)
        if QUERY_LOTS > 1:
            end = tl.where(count > 0, end, begin)  # there is no such token
        table = block_tables + tl.cast(seq, tl.int64) * table_stride
        pages = (cache_head, table, block_stride, slot_stride)

        # Rows of several tokens may see nothing of a tile: then there is no score, and no weight.
        highest = tl.full([ROWS], LOWEST, tl.float32)
        sums = tl.zeros([ROWS, TILE], tl.float32)
        acc = tl.zeros([ROWS, DIMS], tl.float32)
        if sinks is not None:  # a weight without a value, which the first part counts for all
            sink = tl.load(sinks + head, mask=exists, other=0.0) * LOG2E
            highest = tl.where(is_first, tl.maximum(sink, highest), highest)
            sums = tl.where(is_first & (tl.arange(0, TILE) == 0)[None, :], 1.0, sums)
        # The launch has made sure of these multiples of 16 bytes. To know them makes loads wide.
        offset = head.to(tl.int64) * q_head_stride
        position, row_start = None, None
        if query_start_loc is not None:
            offset += token_of * q_token_stride
            position = seq_len - count + token_of
            row_start = first_visible(position, WINDOW)
        offset = tl.multiple_of(offset, Q_ALIGNED)[:, None] + dim[None, :]
        query = tl.load(tl.multiple_of(q + first_token * q_token_stride, 16) + offset, mask=there, other=0.0)
        loop: tl.constexpr = attend_range_int8 if PAIRS else attend_range
        acc, sums, highest = loop(
            *(acc, sums, highest, query, position, row_start, begin, end, pages, scale),
            *(HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, SOFT_CAP),
        )

        total = tl.sum(sums, axis=1)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # zeros, if the sequence is empty
        if is_first & is_last:
            pointer = out + ((first_token + token_of[:, None]) * num_heads + head[:, None]) * HEAD_DIM + dim[None, :]
            tl.store(pointer, result.to(out.dtype.element_ty), mask=there)
        else:
            index = part_of(split, is_first) * KEPT + row
            tl.store(results + index[:, None] * HEAD_DIM + dim[None, :], result, mask=there)
            tl.store(log_sums + index, highest + tl.log2(total), mask=exists)
        seq_len = next_len

    # Two sequences at most have parts elsewhere: that which another split began, and that which another split ends.
    # One thread counts for all: before it does, all have stored; then all see what others stored before they counted.
    tl.debug_barrier()
    for begun_here in tl.range(0, 2, num_stages=1):
        here = begun_here == 1
        its_seq = tl.where(here, last_seq, first_seq).to(tl.int64)
        its_first_split = tl.where(here, split, first_split)
        its_parts = tl.where(here, next_parts, parts)
        if tl.where(here, next_first_split == split, first_split < split):
            arrived = arrivals + lot * num_splits + its_first_split
            if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == its_parts - 1:
                tl.store(arrived, 0)  # nobody else comes before the next launch
                first_token, count = _queries_of(query_start_loc, its_seq, first_query)
                num_outputs = tl.arange(0, KEPT)
                its_head, its_token = num_outputs % HEADS, num_outputs // HEADS
                exists = (its_token < count) & (its_head < GROUP - first_head)
                offset = (its_token * num_heads + kv_head * GROUP + first_head + its_head) * HEAD_DIM
                combine_splits(
                    out + first_token * num_heads * HEAD_DIM, offset, exists, results, log_sums, its_first_split, its_parts,
                    HEAD_DIM, KEPT, AT_ONCE,
                )  # fmt: skip


def paged_decode(
    q: Tensor,
    cache: PagedCache,
    runs: Runs,
    spec: AttentionSpec,
    sinks: Tensor | None,
    tuning: Tuning,
    workspace: Workspace,
) -> Tensor:
    """Attention of the last tokens of each sequence, one or a few, over what each sees: one launch, and one more that plans.

    K and V are read once for all query heads that share them, and for as many tokens as fill a program's rows, with a running
    maximum (Dao et al., FlashAttention, 2022). There are as many programs as run side by side, whatever the lengths are: a launch
    can be captured in a CUDA graph. All read equally many tokens, to within a step of them: none is waited for that has a longer
    sequence. The last program that ends a part of a sequence combines all of them (Flash-Decoding, Dao et al., 2023).

    The earlier of the last tokens multiply V of the later ones by 0, so that V which is not finite spoils them all.

    Args are those of `paged_prefill`, where the new tokens of a sequence are its last ones, and:
        runs: where all have one token, only a sequence of length 0 may have more, or none. Plans for layers with the same window
            are in `runs.plan`, by window and number of splits: the first layer makes one.
        workspace: of the engine; no other launch may use it at the same time.

    Returns, and raises: as `paged_prefill`.
    """
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = cache.k.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    q, window = aligned(q), window_of(spec)
    starts, longest = None, None
    if runs.longest > 1 or num_tokens != len(runs.seq_lens):  # padding may have more tokens than one, or none
        starts, longest = runs.query_start_loc, runs.longest
    tile, num_warps, num_stages = tile_shape(q.dtype, head_dim, tuning, int8=cache.k_scales is not None)
    pairs = pair_tile(q, cache.k, tuning) if starts is None else 0
    tile = pairs or tile
    shape = decode_shape(q, cache.k, longest, tile, num_warps, num_stages, tuning, pairs=pairs > 0)
    group, num_outputs = num_heads // num_kv_heads, shape.heads * shape.tokens
    lots = num_kv_heads * triton.cdiv(group, shape.heads) * shape.query_lots
    splits = max(1, num_multiprocessors(q.device, 132) * shape.side_by_side // lots)
    launch = tuning.launch(num_tokens)
    if runs.plan is None:
        runs.plan = {}
    if (window, splits) not in runs.plan:
        runs.plan[window, splits] = plan_splits(runs.seq_lens, splits, window, launch, starts, shape.step)
        launch = dependent.LAUNCH_PLAIN  # this reads the plan at once
    results = torch.empty(lots, 2 * splits, num_outputs, head_dim, dtype=torch.float32, device=q.device)
    log_sums = torch.empty(lots, 2 * splits, num_outputs, dtype=torch.float32, device=q.device)
    arrivals = workspace.counters(lots * splits, q.device)
    _decode_kernel[(lots, splits)](
        *(out, results, log_sums, arrivals, runs.plan[window, splits], q, *cache),
        *(runs.block_tables, starts, runs.seq_lens, sinks, spec.scale * math.log2(math.e)),
        *(*q.stride()[:2], *cache_strides(cache), runs.block_tables.stride(0)),
        GROUP=group,
        HEADS=shape.heads,
        TOKENS=shape.tokens,
        QUERY_LOTS=shape.query_lots,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        ROWS=shape.rows,
        TILE=tile,
        AT_ONCE=shape.at_once,
        WINDOW=window,
        SOFT_CAP=spec.soft_cap or 0.0,
        PAIRS=pairs > 0,
        num_warps=num_warps,
        num_stages=num_stages,
        maxnreg=shape.registers,
        LAUNCH=launch,
        **dependent.options(launch),
    )
    return out
