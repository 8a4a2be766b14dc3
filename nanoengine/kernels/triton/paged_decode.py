"""Attention of one query per sequence over its paged K/V, cut into parts that run side by side.

It knows block tables and lengths. Whose tokens they are, and how the cache came to be filled, it does not know.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.triton.launch import Launch, num_multiprocessors
from nanoengine.kernels.triton.paged_cache import aligned, cache_strides, dot

ROWS = 16
"""Query heads that a program computes: the smallest tile that tensor cores multiply. Those beyond the group are zeros."""

STEP = 64
"""Parts are multiples of so many tokens, and those of every tile."""

MAX_PARTS = 128
"""Most parts of a sequence: the results of all of them are combined in registers."""

FEW_PARTS = 16
"""Up to so many parts, combining takes a smaller kernel."""

LONGEST_PART = 8192
"""Tokens. A longer sequence is cut even where others fill the device: the step would wait for it alone."""

PROGRAMS_PER_SM = 4
"""Programs side by side that keep a multiprocessor's share of the memory busy, and that its shared memory has room for."""

COLUMNS = 64
"""Most dimensions of a head that are combined together: few enough for the registers, with the most parts."""

COMBINE_WARPS = 8

UNWRITTEN = tl.constexpr(-1e38)
"""Logarithm of the sum of no weights: far below any other, but finite, so that an empty sequence sums up to zeros."""


@triton.jit
def _part_size(seq_len: tl.tensor, num_parts: tl.tensor, STEP: tl.constexpr) -> tl.tensor:
    """Tokens of every part but the last. Since parts are whole steps, the last parts of a short sequence may be empty."""
    return tl.cdiv(tl.cdiv(seq_len, num_parts), STEP) * STEP


@triton.jit(do_not_specialize=["table_stride", "num_parts"])  # they change from step to step
def _decode_kernel(
    out: tl.tensor,
    log_sums: tl.tensor,
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    scale: tl.tensor,
    q_seq_stride: tl.tensor,
    q_head_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    table_stride: tl.tensor,
    num_parts: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    IN_PARTS: tl.constexpr,
) -> None:
    """Program (i, j, p): part p of sequence j, for the i-th chunk of at most ROWS query heads that share a KV head.

    `out` is [num_seqs, num_heads, num_parts, HEAD_DIM]. If there are several parts it is float32, and `log_sums` takes the
    logarithm of the sum of each part's weights. `scale` has log2(e) in it: all exponentials and logarithms are of base 2.
    """
    CHUNKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    ALIGNED: tl.constexpr = 16 // (k_cache.dtype.element_ty.primitive_bitwidth // 8)  # elements in 16 bytes
    kv_head = tl.program_id(0) // CHUNKS
    seq = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    seq_len = tl.load(seq_lens + seq)
    size = _part_size(seq_len, num_parts, STEP)
    start = part * size
    end = tl.minimum(start + size, seq_len)
    if IN_PARTS and start >= seq_len:
        return

    row = (tl.program_id(0) % CHUNKS) * ROWS + tl.arange(0, ROWS)
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
    # The compiler's pipeline runs over three loads: it has the block ids of a tile in shared memory before it asks for the
    # tile, and asks for the tile two rounds before it is used. So a loop of 5 stages holds two tiles of K and of V.
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        present = token < end
        token = tl.minimum(token, end - 1)  # a place beyond the end repeats the last token: no weight, but finite
        block = tl.load(table + token // BLOCK_SIZE).to(tl.int64)  # times the stride it may not fit 32 bits
        place = tl.multiple_of(block * block_stride + token % BLOCK_SIZE * slot_stride, ALIGNED)[:, None] + dim[None, :]
        k = tl.load(k_head + place)
        v = tl.load(v_head + place)
        scores = dot(query, tl.trans(k), tl.zeros([ROWS, TILE], tl.float32)) * scale
        scores = tl.where(present[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))  # finite, since a tile holds at least one token
        shrink = tl.exp2(highest - higher)[:, None]
        weights = tl.exp2(scores - higher[:, None])
        sums = sums * shrink + weights
        acc = dot(weights.to(v.dtype), v, acc * shrink)
        highest = higher

    total = tl.sum(sums, axis=1)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # zeros, if the sequence is empty
    num_heads = tl.num_programs(0) // CHUNKS * GROUP
    index = (seq * num_heads + head) * num_parts + part
    out_pointer = out + index[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_pointer, result.to(out.dtype.element_ty), mask=(row < GROUP)[:, None])
    if IN_PARTS:
        tl.store(log_sums + index, highest + tl.log2(total), mask=row < GROUP)


@triton.jit(do_not_specialize=["num_parts"])
def _combine_kernel(
    out: tl.tensor,
    results: tl.tensor,
    log_sums: tl.tensor,
    seq_lens: tl.tensor,
    num_parts: tl.tensor,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Program (i, j, c): columns c of head i of sequence j. Each part's result counts as much as the sum of its weights."""
    seq = tl.program_id(1).to(tl.int64)
    index = seq * tl.num_programs(0) + tl.program_id(0)
    seq_len = tl.load(seq_lens + seq)
    part = tl.arange(0, MOST_PARTS)
    dim = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    written = part * _part_size(seq_len, num_parts, STEP) < seq_len  # nobody wrote the others, and nobody may read them
    log_sum = tl.load(log_sums + index * num_parts + part, mask=written, other=UNWRITTEN)
    pointer = results + (index * num_parts + part)[:, None] * HEAD_DIM + dim[None, :]
    result = tl.load(pointer, mask=written[:, None], other=0.0)
    weight = tl.exp2(log_sum - tl.max(log_sum, axis=0))  # 0 for the unwritten beside any other
    combined = tl.sum(weight[:, None] * result, axis=0) / tl.sum(weight, axis=0)
    tl.store(out + index * HEAD_DIM + dim, combined.to(out.dtype.element_ty))


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    num_sms: int | None = None,
) -> Tensor:
    """Attention of the last token of each sequence over all of its tokens.

    K and V are read once for all query heads that share them, with a running maximum (Dao et al., FlashAttention, 2022), and
    long sequences are cut into parts (Flash-Decoding, Dao et al., 2023). How many parts depends on shapes alone, so that a
    launch can be captured in a CUDA graph; how long they are, on the lengths.

    Args:
        q: [num_seqs, num_heads, head_dim], head_dim a power of two from 16 to 256.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] of the dtype of q, with the same strides: see
            `paged_cache.cache_strides`. A block_size is a power of two.
        block_tables: [num_seqs, width] int32, rows may have gaps.
        seq_lens: [num_seqs] int32; a sequence of length 0 has a result of zeros.
        scale: factor of the scores, before the softmax.
        num_sms: multiprocessors of the device, if they are not to be asked for.

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
    longest = block_tables.shape[1] * block_size
    parts = count_parts(num_seqs, num_kv_heads, longest, num_sms or num_multiprocessors(q.device, interpreted=132))
    results, log_sums = out, out  # log_sums is not used if there is one part
    if parts > 1:
        results = torch.empty(num_seqs, num_heads, parts, head_dim, dtype=torch.float32, device=q.device)
        log_sums = torch.empty(num_seqs, num_heads, parts, dtype=torch.float32, device=q.device)
    group = num_heads // num_kv_heads
    tile, num_warps, num_stages = _shape(q.dtype, head_dim)
    _decode_kernel[(num_kv_heads * triton.cdiv(group, ROWS), num_seqs, parts)](
        results,
        log_sums,
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        scale * math.log2(math.e),
        *q.stride()[:2],
        *cache_strides(k_cache, v_cache),
        block_tables.stride(0),
        parts,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        ROWS=ROWS,
        TILE=tile,
        STEP=STEP,
        IN_PARTS=parts > 1,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if parts > 1:
        most = FEW_PARTS if parts <= FEW_PARTS else MAX_PARTS
        columns = min(head_dim, COLUMNS)
        _combine_kernel[(num_heads, num_seqs, head_dim // columns)](
            out,
            results,
            log_sums,
            seq_lens,
            parts,
            HEAD_DIM=head_dim,
            COLUMNS=columns,
            MOST_PARTS=most,
            STEP=STEP,
            num_warps=COMBINE_WARPS,
        )
    return out


def count_parts(num_seqs: int, num_kv_heads: int, longest: int, num_sms: int) -> int:
    """Into how many parts each sequence is cut.

    As many as run side by side, and none where the sequences fill the device already: memory is then busy, and since it is
    memory that all wait for, programs that run on while others have ended get the more of it.

    Args:
        longest: tokens that the longest sequence can have, by the width of its block table.
    """
    to_fill = num_sms * PROGRAMS_PER_SM // max(1, num_seqs * num_kv_heads)
    return max(1, min(max(to_fill, triton.cdiv(longest, LONGEST_PART)), triton.cdiv(longest, STEP), MAX_PARTS))


def _shape(dtype: torch.dtype, head_dim: int) -> tuple[int, int, int]:
    """Tokens in a tile, warps and stages: about 32 KB of tiles in flight for a program of 16-bit numbers, and no spills.

    float32 is multiplied without tensor cores, to be exact: it wants threads, and does not wait for memory.
    """
    if dtype is torch.float32:
        return 16, 8, 3
    return (64 if head_dim <= 64 else 32), 4, 5


def launches() -> list[Launch]:
    """What is launched for heads of the usual sizes in groups of two, whole and in parts."""
    integers = ("q_seq_stride", "q_head_stride", "block_stride", "slot_stride", "kv_head_stride", "table_stride")
    types = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    found = []
    for dtype, type_name in types.items():
        for head_dim in (64, 128, 256) if dtype is not torch.float16 else (128,):  # float16 is as bfloat16 is
            tile, num_warps, num_stages = _shape(dtype, head_dim)
            for in_parts in (False, True):
                constants = {
                    "GROUP": 2,
                    "HEAD_DIM": head_dim,
                    "BLOCK_SIZE": 16,
                    "ROWS": ROWS,
                    "TILE": tile,
                    "STEP": STEP,
                    "IN_PARTS": in_parts,
                }
                out = f"*{'fp32' if in_parts else type_name}"
                signature = {
                    "out": out,
                    "log_sums": out,
                    **dict.fromkeys(("q", "k_cache", "v_cache"), f"*{type_name}"),
                    **dict.fromkeys(("block_tables", "seq_lens"), "*i32"),
                    "scale": "fp32",
                    **dict.fromkeys((*integers, "num_parts"), "i32"),
                    **dict.fromkeys(constants, "constexpr"),
                }
                name = f"paged_decode {type_name} {head_dim} {'in parts' if in_parts else 'whole'}"
                found.append(Launch(name, _decode_kernel, signature, constants, num_warps, num_stages))
            for most in (FEW_PARTS, MAX_PARTS) if (dtype, head_dim) == (torch.bfloat16, 128) else ():
                constants = {"HEAD_DIM": head_dim, "COLUMNS": COLUMNS, "MOST_PARTS": most, "STEP": STEP}
                signature = {
                    "out": f"*{type_name}",
                    **dict.fromkeys(("results", "log_sums"), "*fp32"),
                    "seq_lens": "*i32",
                    "num_parts": "i32",
                    **dict.fromkeys(constants, "constexpr"),
                }
                name = f"paged_decode combine {type_name} {head_dim} {most}"
                found.append(Launch(name, _combine_kernel, signature, constants, COMBINE_WARPS))
    return found
