"""Attention of the last token of each sequence over its paged K/V, by programs that all read equally many tokens.

It knows block tables and lengths. Whose tokens they are, and how the cache came to be filled, it does not know. Several tokens of
a sequence are `drafted_decode`.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.triton import dependent
from nanoengine.kernels.triton.attention.equal_shares import combine_shares, part_of, plan_shares
from nanoengine.kernels.triton.attention.int8_walk import pair_tile, walk_int8
from nanoengine.kernels.triton.attention.kv_int8 import NUMBERS_IN_SCALE
from nanoengine.kernels.triton.attention.paged_cache import (
    LOG2E,
    aligned,
    ask_for,
    cache_strides,
    first_seen,
    within,
)
from nanoengine.kernels.triton.attention.paged_walk import ROWS, tile_shape, walk
from nanoengine.kernels.triton.attention.split_kv import COMBINED, STEP, Workspace
from nanoengine.kernels.triton.launch import num_multiprocessors
from nanoengine.kernels.triton.tuning import Tuning

REGISTERS = 1 << 16
"""Of a multiprocessor. Programs that do not run side by side with the others would begin when those end."""

RESERVED = 1 << 10
"""Bytes of shared memory that CUDA takes for every program."""

Plans = dict[tuple[int, int], Tensor]
"""Those of a step, by window and number of shares."""


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["block_tables", "seq_lens"])
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
    STEP: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PAIRS: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Program (i, j): share j of all tokens, for the i-th lot of HEADS query heads that share a KV head.

    The share that reads all of a sequence writes to `out`. Others write their rows to `results`, [lots, 2 * shares, HEADS,
    HEAD_DIM], at `part_of`, and the logarithms of the sums of their weights to `log_sums`, both float32; the last of them to
    arrive, by the count of `arrivals`, [lots, shares], combines them all. `scale` has log2(e) in it.
    """
    dependent.start(LAUNCH)
    DIMS: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    LOTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    ALIGNED: tl.constexpr = 16 // (k_cache.dtype.element_ty.primitive_bitwidth // 8)  # elements in 16 bytes
    Q_ALIGNED: tl.constexpr = 16 // (q.dtype.element_ty.primitive_bitwidth // 8)
    lot, share = tl.program_id(0), tl.program_id(1)
    num_shares, num_heads = tl.num_programs(1), tl.num_programs(0) // LOTS * GROUP
    kv_head, first_head = lot // LOTS, lot % LOTS * HEADS
    results += lot.to(tl.int64) * (2 * num_shares * HEADS * HEAD_DIM)
    log_sums += lot * (2 * num_shares * HEADS)

    # Where this share begins, and where the next one does: see `plan_shares`.
    size = num_shares + 1
    own = plan + share
    first_seq, last_seq = tl.load(own), tl.load(own + 1)
    start, stop = tl.load(own + size), tl.load(own + size + 1)
    seq_len = tl.load(own + 2 * size)
    first_share, next_first_share = tl.load(own + 3 * size), tl.load(own + 3 * size + 1)
    parts, next_parts = tl.load(own + 4 * size), tl.load(own + 4 * size + 1)
    is_cut = next_first_share <= share  # the last sequence goes on in the next share
    end_seq = tl.where(is_cut, last_seq + 1, last_seq)

    head_start = tl.multiple_of(kv_head.to(tl.int64) * kv_head_stride, ALIGNED)
    k_head = tl.multiple_of(k_cache + head_start, 16)
    v_head = tl.multiple_of(v_cache + head_start, 16)
    if k_scales is not None:
        k_scales += head_start // NUMBERS_IN_SCALE
        v_scales += head_start // NUMBERS_IN_SCALE
    # Tables and lengths are older than the embeddings of the step, which are launched behind everything before them. The plan
    # is older than this kernel in the layer before, which lets others start behind its own wait only; the layer that plans
    # launches it plainly. So all of these may be read before the wait. The query, and K and V of new tokens, may not: of K and
    # V only a hint comes before.
    if LAUNCH:
        table = block_tables + first_seq.to(tl.int64) * table_stride
        end = tl.where(first_seq == last_seq, stop, seq_len)
        ask_for(k_head, v_head, table, start, end, block_stride, slot_stride, HEAD_DIM, BLOCK_SIZE, STEP)
    dependent.wait(LAUNCH)

    row = tl.arange(0, ROWS)
    exists = (row < HEADS) & (row < GROUP - first_head)
    head = kv_head * GROUP + first_head + row
    dim = tl.arange(0, DIMS)
    there = within(exists, dim, HEAD_DIM)
    # What is the same for all sequences is worked out again for each: kept, it would take too many registers.
    for seq in tl.range(first_seq, end_seq, num_stages=1, disable_licm=True):
        next_len = tl.load(seq_lens + seq + 1, mask=seq + 1 < end_seq, other=0)  # long before it is asked for
        is_first = (seq > first_seq) | (first_share == share)  # the share that has the first tokens of the sequence
        is_last = (seq < last_seq) | (is_cut == 0)  # the one that has its last token
        # Not carried over from the sequence before: Triton 3.6 takes what an outer loop carries for a constant, where nothing but
        # the bounds of an inner loop use it.
        begin = first_seen(seq_len - 1, WINDOW) if WINDOW else 0
        begin = tl.where(seq == first_seq, start, begin)
        end = tl.where(is_last, seq_len, stop)
        token = tl.cast(seq, tl.int64)
        table = block_tables + token * table_stride

        highest = tl.full([ROWS], float("-inf"), tl.float32)
        sums = tl.zeros([ROWS, TILE], tl.float32)
        acc = tl.zeros([ROWS, DIMS], tl.float32)
        if sinks is not None:  # a weight without a value, which the first part counts for all
            sink = tl.load(sinks + head, mask=exists, other=0.0) * LOG2E
            highest = tl.where(is_first, sink, highest)
            sums = tl.where(is_first & (tl.arange(0, TILE) == 0)[None, :], 1.0, sums)
        # The launch has made sure of these multiples of 16 bytes. To know them makes loads wide.
        place = tl.multiple_of(head.to(tl.int64) * q_head_stride, Q_ALIGNED)[:, None] + dim[None, :]
        query = tl.load(tl.multiple_of(q + token * q_token_stride, 16) + place, mask=there, other=0.0)
        loop: tl.constexpr = walk_int8 if PAIRS else walk
        acc, sums, highest = loop(
            acc, sums, highest, query, None, None, begin, end, k_head, v_head, k_scales, v_scales, table, block_stride,
            slot_stride, scale, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, SOFT_CAP,
        )  # fmt: skip

        total = tl.sum(sums, axis=1)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # zeros, if the sequence is empty
        if is_first & is_last:
            pointer = out + (token * num_heads + head[:, None]) * HEAD_DIM + dim[None, :]
            tl.store(pointer, result.to(out.dtype.element_ty), mask=there)
        else:
            index = part_of(share, is_first) * HEADS + row
            tl.store(results + index[:, None] * HEAD_DIM + dim[None, :], result, mask=there)
            tl.store(log_sums + index, highest + tl.log2(total), mask=exists)
        seq_len = next_len

    # Two sequences at most have parts elsewhere: that which another share began, and that which another share ends.
    # One thread counts for all: before it does, all have stored; then all see what others stored before they counted.
    tl.debug_barrier()
    for begun_here in tl.range(0, 2, num_stages=1):
        here = begun_here == 1
        its_seq = tl.where(here, last_seq, first_seq).to(tl.int64)
        its_first_share = tl.where(here, share, first_share)
        its_parts = tl.where(here, next_parts, parts)
        if tl.where(here, next_first_share == share, first_share < share):
            count = arrivals + lot * num_shares + its_first_share
            if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == its_parts - 1:
                tl.store(count, 0)  # nobody else comes before the next launch
                kept = tl.arange(0, HEADS)
                its_place = (kv_head * GROUP + first_head + kept) * HEAD_DIM
                combine_shares(
                    out + its_seq * num_heads * HEAD_DIM, its_place, kept < GROUP - first_head, results, log_sums,
                    its_first_share, its_parts, HEAD_DIM, HEADS, AT_ONCE,
                )  # fmt: skip


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    workspace: Workspace,
    tuning: Tuning,
    plans: Plans,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention of the last token of each sequence over the tokens that it sees, in one launch, and one more that plans.

    K and V are read once for all query heads that share them, with a running maximum (Dao et al., FlashAttention, 2022). There
    are as many programs as run side by side, whatever the lengths are, so that a launch can be captured in a CUDA graph. All read
    equally many tokens, to within STEP of them: none is waited for that has a longer sequence. The last program that ends a part
    of a sequence combines all of them (Flash-Decoding, Dao et al., 2023).

    Args are those of `paged_prefill`, where token i is the last one of sequence i, and:
        workspace: of the engine; no other launch may use it at the same time.
        plans: those of layers before with the same lengths; this one's is added if it is not there.
    """
    num_seqs, (num_tokens, num_heads, head_dim) = len(seq_lens), q.shape
    assert num_tokens == num_seqs, "a sequence has one token"
    block_size, num_kv_heads = k_cache.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    q = aligned(q)
    tile, num_warps, num_stages = tile_shape(q.dtype, head_dim, tuning, int8=k_scales is not None)
    pairs = pair_tile(q, k_cache, tuning)
    tile = pairs or tile
    group = num_heads // num_kv_heads
    heads = triton.next_power_of_2(min(group, ROWS))
    lots = num_kv_heads * triton.cdiv(group, heads)
    side_by_side = _side_by_side(q, k_cache, tile, num_stages, tuning)
    shares = max(1, num_multiprocessors(q.device, 132) * side_by_side // lots)
    launch = tuning.launch(num_tokens)
    if (window, shares) not in plans:
        plans[window, shares] = plan_shares(seq_lens, shares, window, launch)
        launch = dependent.LAUNCH_PLAIN  # this reads the plan at once
    results = torch.empty(lots, 2 * shares, heads, head_dim, dtype=torch.float32, device=q.device)
    log_sums = torch.empty(lots, 2 * shares, heads, dtype=torch.float32, device=q.device)
    _decode_kernel[(lots, shares)](
        out,
        results,
        log_sums,
        workspace.counters(lots * shares, q.device),
        plans[window, shares],
        q,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        block_tables,
        seq_lens,
        sinks,
        scale * math.log2(math.e),
        *q.stride()[:2],
        *cache_strides(k_cache, v_cache, k_scales, v_scales),
        block_tables.stride(0),
        GROUP=group,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        ROWS=ROWS,
        TILE=tile,
        STEP=STEP,
        AT_ONCE=max(1, COMBINED * num_warps // (heads * triton.next_power_of_2(head_dim))),
        WINDOW=window,
        SOFT_CAP=soft_cap or 0.0,
        PAIRS=pairs > 0,
        num_warps=num_warps,
        num_stages=num_stages,
        maxnreg=min(255, REGISTERS // (32 * num_warps * side_by_side) // 8 * 8),
        LAUNCH=launch,
        **dependent.options(launch),
    )
    return out


def _side_by_side(q: Tensor, k_cache: Tensor, tile: int, num_stages: int, tuning: Tuning) -> int:
    """Programs that run side by side on a multiprocessor: those of the tuning, if it has room for them.

    Fewer have registers where they have twice as many warps (float32), where they dequantize numbers of 8 bits, most of all in
    heads that are not of 128, and where long tiles have more scores. Shared memory holds the tiles of K and V that are on their
    way, the query, block ids and scales; Triton 3.6 takes just that.
    """
    count, dims, size = tuning.decode_programs_per_sm, triton.next_power_of_2(q.shape[2]), k_cache.element_size()
    if q.dtype is torch.float32:
        count //= 2
    elif size == 1:
        count = tuning.int8_programs_per_sm
        if dims != 128:
            count = min(count, 3 if pair_tile(q, k_cache, tuning) else 2)
    elif tile > 32:
        count = count * 3 // 4
    tiles = 2 * tile * dims * size * ((num_stages - 3) // 2 + 1)
    beside = ROWS * dims * q.element_size() + tile * (68 if size == 1 else 44) + RESERVED
    return max(1, min(count, _shared_memory(q.device) // (tiles + beside)))


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a multiprocessor has; for the interpreter those of an H100."""
    if device.type != "cuda":
        return 228 << 10
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)
