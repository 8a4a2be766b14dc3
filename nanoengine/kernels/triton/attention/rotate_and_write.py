"""All that happens to q, k and v between their projection and attention, in one kernel: the norms of the heads of q and k, the
rotary embedding, and the writing of K and V to the paged cache. It knows slots, not sequences. Norms, rotation and q may each be
missing.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nanoengine.core.attention import KVLayer
from nanoengine.kernels.operations import Changes
from nanoengine.kernels.triton import dependent
from nanoengine.kernels.triton.attention.kv_int8 import NUMBERS_IN_SCALE, check_scales, quantized, scale_of
from nanoengine.kernels.triton.attention.paged_cache import PagedCache, within

ELEMENTS = 1024
"""Of a group of heads: enough for wide reads, and few enough that one token still is work for several programs."""


@triton.jit
def _store(cache, slot, first, second, dtype: tl.constexpr, HALF: tl.constexpr):
    """Write the halves of the heads of a token, each [heads, HALF] float32, rounded to a dtype even if the cache has 8 bits.

    Args:
        cache: (numbers, scales, strides of blocks, slots and heads) of K or of V.
        slot: (block, offset in the block, heads, which of them are written).
    """
    numbers, scales, block_stride, slot_stride, head_stride = cache
    block, offset, head, written = slot
    head = head.to(tl.int64)[:, None]
    pair = tl.arange(0, first.shape[1])
    target = numbers + block * block_stride + offset * slot_stride + head * head_stride + pair[None, :]
    first, second = first.to(dtype), second.to(dtype)
    if scales is not None:
        first, second = first.to(tl.float32), second.to(tl.float32)
        scale = tl.maximum(scale_of(first), scale_of(second), propagate_nan=tl.PropagateNan.ALL)
        first, second = quantized(first, scale), quantized(second, scale)
        scale_offset = (block * block_stride + head * head_stride) // NUMBERS_IN_SCALE + offset
        tl.store(scales + scale_offset, scale[:, None], mask=written)
    if pair.shape[0] > HALF:
        written = written & (pair < HALF)[None, :]
    tl.store(target, first, mask=written)
    tl.store(target + HALF, second, mask=written)


@triton.jit
def rotate_and_write_kernel(
    q,
    k,
    v,
    q_weight,
    k_weight,
    eps,
    cos,
    sin,
    slots,
    q_out,
    k_out,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    num_heads,
    num_kv_heads,
    q_stride,
    k_stride,
    v_stride,
    q_out_stride,
    angle_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    NORM_HEADS: tl.constexpr,
    ROTATE: tl.constexpr,
    LAUNCH: tl.constexpr,
    token=None,
    group=None,
):
    """Program (i, j): group j of the heads of token i. The groups of q come first, then those of k and those of v.

    The last programs of a product call it, too, with the token and the group that they have computed (`products/heads.py`).
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    if token is None:
        dependent.start(LAUNCH)
        dependent.wait(LAUNCH)  # the kernel before may still write what this one reads, or read where it writes
        token = tl.program_id(0).to(tl.int64)
        group = tl.program_id(1)
    q_groups = tl.cdiv(num_heads, HEADS)
    kv_groups = tl.cdiv(num_kv_heads, HEADS)
    is_q = group < q_groups
    is_v = group >= q_groups + kv_groups

    # The group's heads among all of q, k or v.
    group_of_kind = tl.where(is_q, group, tl.where(is_v, group - q_groups - kv_groups, group - q_groups))
    count = tl.where(is_q, num_heads, num_kv_heads)
    stride = tl.where(is_q, q_stride, tl.where(is_v, v_stride, k_stride))
    head = group_of_kind * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, triton.next_power_of_2(HALF))
    mask = within(head < count, pair, HALF)
    heads = q if is_q else (v if is_v else k)
    source = heads + token * stride + (head * HEAD_DIM)[:, None] + pair[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)

    slot = tl.load(slots + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    target_slot = (block, offset, head, (head < tl.where(slot < 0, 0, count))[:, None])
    if is_v:
        target_cache = (v_cache, v_scales, v_block_stride, v_slot_stride, v_head_stride)
        _store(target_cache, target_slot, first, second, v.dtype.element_ty, HALF)
    else:
        there = (pair < HALF) if pair.shape[0] > HALF else None
        # All loads come before the sum, for which warps wait: they are on their way at the same time.
        if NORM_HEADS:
            weight = (q_weight if is_q else k_weight) + pair
            first_factor, second_factor = tl.load(weight, mask=there), tl.load(weight + HALF, mask=there)
        if ROTATE:
            angle = token * angle_stride + pair
            cosine, sine = tl.load(cos + angle, mask=there), tl.load(sin + angle, mask=there)
        if NORM_HEADS:
            square = tl.sum(first * first + second * second, axis=1) / HEAD_DIM
            scale = (1.0 / tl.sqrt(square + eps))[:, None]
            first, second = first * scale * first_factor[None, :], second * scale * second_factor[None, :]
        if ROTATE:
            cosine, sine = cosine[None, :], sine[None, :]
            first, second = first * cosine - second * sine, second * cosine + first * sine
        if is_q:
            target = q_out + token * q_out_stride + (head * HEAD_DIM)[:, None] + pair[None, :]
            tl.store(target, first.to(q_out.dtype.element_ty), mask=mask)
            tl.store(target + HALF, second.to(q_out.dtype.element_ty), mask=mask)
        else:
            if k_out is not None:
                target = k_out + token * k_stride + (head * HEAD_DIM)[:, None] + pair[None, :]
                tl.store(target, first.to(k_out.dtype.element_ty), mask=mask)
                tl.store(target + HALF, second.to(k_out.dtype.element_ty), mask=mask)
            target_cache = (k_cache, k_scales, k_block_stride, k_slot_stride, k_head_stride)
            _store(target_cache, target_slot, first, second, k.dtype.element_ty, HALF)


def rotate_and_write(
    qkv: Tensor,
    changes: Changes,
    kv: KVLayer | PagedCache,
    slot_mapping: Tensor,
    launch: int = dependent.LAUNCH_PLAIN,
    *,
    in_place: bool = False,
) -> Tensor:
    """Norm and rotate the heads of q and k, write k and v to the cache, and return q.

    RMSNorm (Zhang and Sennrich, 2019) and the rotary embedding (Su et al., RoFormer, 2021; half-split layout) are computed in
    float32, and rounded once, at the end.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], the heads of q, then of k, then of v; rows may have gaps.
        changes: norms and rotation, see `attention.backend`.
        kv: K and V each [num_blocks, block_size, num_kv_heads, head_dim], with any strides but for the last dimension's, 1.
        slot_mapping: [num_tokens] int64: where each token is written, in slots of the cache; -1 is nowhere.
        launch: see `dependent.py`.
        in_place: q and k take the places of what they were in qkv, and V is behind them there.

    Returns:
        q, [num_tokens, num_heads, head_dim], of the dtype of qkv.
    """
    num_kv_heads, head_dim = kv[0].shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    assert qkv.stride(1) == 1
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    q_out = q if in_place else q.new_empty(q.shape)
    k_out = k if in_place else None
    _launch(*arguments(q, k, v, changes, slot_mapping, q_out, k_out, PagedCache(*kv)), launch)
    return q_out


def write_kv(k: Tensor, v: Tensor, kv: KVLayer | PagedCache, slot_mapping: Tensor) -> None:
    """Write k and v to the cache, as they are or in 8 bits.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim] of the cache's dtype, unless that is int8; rows may have gaps, heads may not.
        kv, slot_mapping: as for `rotate_and_write`.
    """
    no_q, unchanged = k[:, :0], (None, None, 0.0, None, None)
    heads, constants = arguments(no_q, k, v, unchanged, slot_mapping, no_q, None, PagedCache(*kv))
    _launch(heads, constants, dependent.LAUNCH_PLAIN)


def _launch(heads: tuple[Any, ...], constants: dict[str, Any], launch: int) -> None:
    """Of `arguments`, if there are tokens."""
    q, k = heads[:2]
    num_tokens, num_kv_heads, head_dim = k.shape
    if not num_tokens:
        return
    per_group = heads_of_a_group(head_dim)
    grid = (num_tokens, triton.cdiv(q.shape[1], per_group) + 2 * triton.cdiv(num_kv_heads, per_group))
    options = {"num_warps": _num_warps(k.itemsize), **dependent.options(launch)}
    rotate_and_write_kernel[grid](*heads, **constants, HEADS=per_group, LAUNCH=launch, **options)


def arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    changes: Changes,
    slot_mapping: Tensor,
    q_out: Tensor,
    k_out: Tensor | None,
    cache: PagedCache,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the kernel, and the sizes that are compiled into it, but for HEADS and LAUNCH.

    Args:
        q, k, v: [num_tokens, heads, head_dim]; rows may have gaps, heads may not.
    """
    q_weight, k_weight, _, cos, sin = changes
    _, num_kv_heads, head_dim = k.shape
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    assert cache.k.stride(3) == cache.v.stride(3) == 1
    assert slot_mapping.is_contiguous()
    if cache.k_scales is not None and cache.v_scales is not None:
        check_scales(cache.k, cache.k_scales)
        check_scales(cache.v, cache.v_scales)
    angle_stride = 0
    if cos is not None and sin is not None:
        assert cos.stride(2) == sin.stride(2) == 1
        angle_stride = cos.stride(0)
        assert sin.stride(0) == angle_stride
    tensors = q, k, v, *changes, slot_mapping, q_out, k_out, *cache
    strides = (
        q.stride(0),
        k.stride(0),
        v.stride(0),
        q_out.stride(0),
        angle_stride,
        *cache.k.stride()[:3],
        *cache.v.stride()[:3],
    )
    return (*tensors, q.shape[1], num_kv_heads, *strides), {
        "BLOCK_SIZE": cache.k.shape[1],
        "HEAD_DIM": head_dim,
        "NORM_HEADS": q_weight is not None and k_weight is not None,
        "ROTATE": cos is not None and sin is not None,
    }


def heads_of_a_group(head_dim: int) -> int:
    """Heads that a program works on."""
    return max(1, ELEMENTS // triton.next_power_of_2(head_dim))


def _num_warps(itemsize: int) -> int:
    """Such that every thread reads 16 bytes at a time."""
    return ELEMENTS // 2 * itemsize // 16 // 32
