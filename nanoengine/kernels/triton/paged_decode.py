"""Attention of one query per sequence over its paged K/V, cut into parts that run side by side.

It knows block tables and lengths. Whose tokens they are, and how the cache came to be filled, it does not know.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.triton.launch import Launch, num_multiprocessors
from nanoengine.kernels.triton.paged_cache import LOG2E, aligned, cache_strides, capped, dot, first_seen
from nanoengine.kernels.triton.split_kv import COMBINED, MAX_PARTS, STEP, Split, Workspace, combine, part_size, split
from nanoengine.kernels.triton.tuning import DEFAULTS, Tuning

ROWS = 16
"""Query heads that a program computes: the smallest tile that tensor cores multiply. Those beyond the group are zeros."""

CANDIDATES = ((32, 4, 5), (32, 4, 7), (16, 2, 7), (64, 4, 5))
"""Tiles, warps and stages that are worth measuring, as `Tuning` has them: from 24 to 64 KB of tiles in shared memory."""


@triton.jit(
    do_not_specialize=["table_stride", "to_fill", "longest_part", "most_parts"],  # they change from step to step
    do_not_specialize_on_alignment=["block_tables", "seq_lens"],
)
def _decode_kernel(
    out: tl.tensor,
    results: tl.tensor,
    log_sums: tl.tensor,
    arrivals: tl.tensor,
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    sinks: tl.tensor | None,
    scale: tl.tensor,
    q_seq_stride: tl.tensor,
    q_head_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    table_stride: tl.tensor,
    to_fill: tl.tensor,
    longest_part: tl.tensor,
    most_parts: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    HEADS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (i, j, p): part p of what is seen of sequence j, for the i-th lot of at most ROWS query heads that share a KV head.

    The only part of a sequence writes to `out`, [num_seqs, num_heads, HEAD_DIM]. One of several writes to `results`,
    [num_seqs, num_heads, most_parts, HEAD_DIM], and the logarithm of the sum of its weights to `log_sums`, both float32;
    the last of them to arrive, by the count of `arrivals`, combines them all. `scale` has log2(e) in it: all exponentials and
    logarithms are of base 2.
    """
    if DEPENDENT:  # the kernel before may still write what this one reads, or read where it writes
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    LOTS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    ALIGNED: tl.constexpr = 16 // (k_cache.dtype.element_ty.primitive_bitwidth // 8)  # elements in 16 bytes
    kv_head = tl.program_id(0) // LOTS
    seq = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    seq_len = tl.load(seq_lens + seq)
    seen = seq_len
    if WINDOW or CHUNK:
        seen = seq_len - first_seen(seq_len - 1, WINDOW, CHUNK)
    size = part_size(seen, to_fill, longest_part, STEP)
    parts = tl.maximum(tl.cdiv(seen, size), 1)
    if part >= parts:
        return
    start = part * size
    if WINDOW or CHUNK:
        start += seq_len - seen
    end = tl.minimum(start + size, seq_len)

    first_row = (tl.program_id(0) % LOTS) * ROWS
    row = first_row + tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    dim = tl.arange(0, HEAD_DIM)
    # The launch has made sure of these multiples of 16 bytes. To know them makes loads wide, and those of K/V asynchronous.
    q_start = tl.multiple_of(q + seq * q_seq_stride, 16)
    q_place = tl.multiple_of(head.to(tl.int64) * q_head_stride, ALIGNED)[:, None] + dim[None, :]
    query = tl.load(q_start + q_place, mask=(row < GROUP)[:, None], other=0.0)
    head_start = tl.multiple_of(kv_head.to(tl.int64) * kv_head_stride, ALIGNED)
    k_head = tl.multiple_of(k_cache + head_start, 16)
    v_head = tl.multiple_of(v_cache + head_start, 16)
    table = block_tables + seq * table_stride

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS, TILE], tl.float32)  # summed up over the tile once, at the end: warps need not meet for it
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    if sinks is not None:  # a weight without a value, which the first part counts for all
        sink = tl.load(sinks + head, mask=row < GROUP, other=0.0) * LOG2E
        highest = tl.where(part == 0, sink, highest)
        sums = tl.where((part == 0) & (tl.arange(0, TILE) == 0)[None, :], 1.0, sums)
    # The compiler's pipeline runs over three loads: it has the block ids of a tile in shared memory before it asks for the
    # tile, and asks for the tile two rounds or more before it is used. So a loop of 3 + 2 n stages holds 1 + n tiles of K and
    # of V.
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        present = token < end
        token = tl.minimum(token, end - 1)  # a place beyond the end repeats the last token: no weight, but finite
        block = tl.load(table + token // BLOCK_SIZE).to(tl.int64)  # times the stride it may not fit 32 bits
        place = tl.multiple_of(block * block_stride + token % BLOCK_SIZE * slot_stride, ALIGNED)[:, None] + dim[None, :]
        k = tl.load(k_head + place)
        v = tl.load(v_head + place)
        scores = dot(query, tl.trans(k), tl.zeros([ROWS, TILE], tl.float32)) * scale
        scores = tl.where(present[None, :], capped(scores, SOFT_CAP), float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))  # finite, since a tile holds at least one token
        shrink = tl.exp2(highest - higher)[:, None]
        weights = tl.exp2(scores - higher[:, None])
        sums = sums * shrink + weights
        acc = dot(weights.to(v.dtype), v, acc * shrink)
        highest = higher

    total = tl.sum(sums, axis=1)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # zeros, if the sequence is empty
    first_head = (seq * (tl.num_programs(0) // LOTS) + kv_head) * GROUP + first_row
    out += first_head * HEAD_DIM
    place = tl.arange(0, ROWS)
    if parts == 1:
        pointer = out + place[:, None] * HEAD_DIM + dim[None, :]
        tl.store(pointer, result.to(out.dtype.element_ty), mask=(row < GROUP)[:, None])
    else:
        results += first_head * most_parts * HEAD_DIM
        log_sums += first_head * most_parts
        index = place * most_parts + part
        tl.store(results + index[:, None] * HEAD_DIM + dim[None, :], result, mask=(row < GROUP)[:, None])
        tl.store(log_sums + index, highest + tl.log2(total), mask=row < GROUP)
        # One thread counts for all: before it does, all have stored, and when it has, all see what others stored before they
        # counted.
        tl.debug_barrier()
        arrived = arrivals + seq * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == parts - 1:
            tl.store(arrived, 0)  # nobody else comes before the next launch
            combine(out, results, log_sums, GROUP - first_row, parts, most_parts, HEAD_DIM, HEADS, MAX_PARTS, AT_ONCE)


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    workspace: Workspace,
    tuning: Tuning = DEFAULTS,
    num_sms: int | None = None,
    *,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention of the last token of each sequence over the tokens that it sees, in one launch.

    K and V are read once for all query heads that share them, with a running maximum (Dao et al., FlashAttention, 2022), and
    long sequences are cut into parts (Flash-Decoding, Dao et al., 2023), which the last program to end combines. How many parts
    there can be depends on shapes alone, so that a launch can be captured in a CUDA graph; how many there are, and how long, on
    the lengths: see `split`.

    Args:
        q: [num_seqs, num_heads, head_dim], head_dim a power of two from 16 to 256.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] of the dtype of q, with the same strides: see
            `paged_cache.cache_strides`. A block_size is a power of two.
        block_tables: [num_seqs, width] int32, rows may have gaps.
        seq_lens: [num_seqs] int32; a sequence of length 0 has a result of zeros.
        scale: factor of the scores, before the softmax.
        workspace: of the engine; no other launch may use it at the same time.
        tuning: how 16-bit numbers are computed.
        num_sms: multiprocessors of the device, if they are not to be asked for.
        window, chunk: tokens that are seen: the last `window`, those from the last multiple of `chunk` on; all if both are None.
            In a block table, what stands before the first of them is not read.
        sinks: [num_heads] float32, contiguous: one more score for each head, which takes weight and has no value.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); not those of sinks.

    Returns:
        [num_seqs, num_heads, head_dim], of the dtype of q; sums are float32.

    Raises:
        ValueError: the cache does not lie as the kernel reads it.
    """
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    q = aligned(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_seqs:
        return out
    group = num_heads // num_kv_heads
    num_lots = num_kv_heads * triton.cdiv(group, ROWS)
    longest = min(x for x in (block_tables.shape[1] * block_size, window, chunk) if x is not None)
    num_sms = num_sms or num_multiprocessors(q.device, interpreted=132)
    cut = split(num_seqs * num_lots, longest, num_sms, tuning)
    in_parts = cut.most_parts if cut.most_parts > 1 else 0
    results = torch.empty(num_seqs, num_heads, in_parts, head_dim, dtype=torch.float32, device=q.device)
    log_sums = torch.empty(num_seqs, num_heads, in_parts, dtype=torch.float32, device=q.device)
    tile, num_warps, num_stages = _shape(q.dtype, head_dim, tuning)
    _decode_kernel[(num_lots, num_seqs, cut.most_parts)](
        out,
        results,
        log_sums,
        workspace.counters(num_seqs * num_lots, q.device),
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        sinks,
        scale * math.log2(math.e),
        *q.stride()[:2],
        *cache_strides(k_cache, v_cache),
        block_tables.stride(0),
        *cut,
        **_constants(group, head_dim, block_size, tile, num_warps, tuning.dependent_launch),
        WINDOW=window or 0,
        CHUNK=chunk or 0,
        SOFT_CAP=soft_cap or 0.0,
        num_warps=num_warps,
        num_stages=num_stages,
        **({"launch_pdl": True} if tuning.dependent_launch else {}),
    )
    return out


def _shape(dtype: torch.dtype, head_dim: int, tuning: Tuning) -> tuple[int, int, int]:
    """Tokens in a tile, warps and stages. `tuning` means heads of 128; others have tiles of as many bytes, if they can.

    float32 is multiplied without tensor cores, to be exact: it wants threads, and does not wait for memory.
    """
    if dtype is torch.float32:
        return 16, 8, 3
    tile = max(16, min(tuning.decode_tile * 128 // head_dim, STEP))  # 16 is the least that tensor cores sum over
    return tile, tuning.decode_warps, tuning.decode_stages


def _constants(
    group: int, head_dim: int, block_size: int, tile: int, num_warps: int, dependent: bool
) -> dict[str, int | bool]:
    """What the kernel is compiled for."""
    heads = triton.next_power_of_2(min(group, ROWS))
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "ROWS": ROWS,
        "TILE": tile,
        "STEP": STEP,
        "HEADS": heads,
        "MAX_PARTS": MAX_PARTS,
        "AT_ONCE": max(1, COMBINED * num_warps // (heads * head_dim)),
        "DEPENDENT": dependent,
    }


def launches() -> list[Launch]:
    """What is launched for heads of the usual sizes in groups of two; for bfloat16 and heads of 128 also every candidate, groups
    of other sizes, and the launch that does not wait for the one before. And what some models ask for: Llama 4, Gemma 2 and
    gpt-oss.
    """
    tunings = [
        replace(DEFAULTS, decode_tile=tile, decode_warps=num_warps, decode_stages=num_stages)
        for tile, num_warps, num_stages in CANDIDATES
    ]
    return [
        *(_launch(torch.bfloat16, 128, tuning=tuning) for tuning in tunings),
        *(_launch(torch.bfloat16, 128, group) for group in (1, 4, 8, 16)),
        _launch(torch.bfloat16, 128, tuning=replace(DEFAULTS, dependent_launch=True)),
        *(_launch(torch.bfloat16, head_dim) for head_dim in (64, 256)),
        _launch(torch.float16, 128),  # it is as bfloat16 is
        _launch(torch.bfloat16, 128, group=5, CHUNK=8192),
        _launch(torch.bfloat16, 256, WINDOW=4096, SOFT_CAP=50.0),
        _launch(torch.bfloat16, 64, group=8, WINDOW=128, sinks=True),
        *(_launch(torch.float32, head_dim) for head_dim in (64, 128, 256)),
        _launch(torch.float32, 128, WINDOW=4096, sinks=True, SOFT_CAP=50.0),
    ]


def _launch(
    dtype: torch.dtype,
    head_dim: int,
    group: int = 2,
    tuning: Tuning = DEFAULTS,
    *,
    sinks: bool = False,
    **asked: float,
) -> Launch:
    type_name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    shape = tile, num_warps, num_stages = _shape(dtype, head_dim, tuning)
    sizes = _constants(group, head_dim, 16, tile, num_warps, tuning.dependent_launch)
    constants = {**sizes, "WINDOW": 0, "CHUNK": 0, "SOFT_CAP": 0.0, **asked}
    strides = ("q_seq_stride", "q_head_stride", "block_stride", "slot_stride", "kv_head_stride", "table_stride")
    signature = {
        "out": f"*{type_name}",
        **dict.fromkeys(("results", "log_sums"), "*fp32"),
        "arrivals": "*i32",
        **dict.fromkeys(("q", "k_cache", "v_cache"), f"*{type_name}"),
        **dict.fromkeys(("block_tables", "seq_lens"), "*i32"),
        "sinks": "*fp32" if sinks else "constexpr",
        "scale": "fp32",
        **dict.fromkeys((*strides, *Split._fields), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    name = f"paged_decode {type_name} {head_dim} group {group} {shape}{' dependent' * tuning.dependent_launch}"
    name += "".join(f" {key} {value}" for key, value in asked.items()) + " sinks" * sinks
    known = constants if sinks else constants | {"sinks": None}
    least = 90 if tuning.dependent_launch else 80
    return Launch(name, _decode_kernel, signature, known, num_warps, num_stages, least_capability=least)
