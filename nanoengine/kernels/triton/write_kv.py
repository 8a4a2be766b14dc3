"""K and V of new tokens into the paged cache, as they are or in 8 bits. It knows slots, not sequences."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.triton.kv_int8 import NUMBERS_IN_SCALE, check_scales, quantized, scale_of
from nanoengine.kernels.triton.launch import Launch
from nanoengine.kernels.triton.rotate_and_write import heads_of_a_group

NUM_WARPS = 4


@triton.jit
def _write_kv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    slots: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor | None,
    v_scales: tl.tensor | None,
    num_kv_heads: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    k_block_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_block_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    v_head_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Program (i, j): group j of the heads of token i."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mask = (head < num_kv_heads)[:, None]
    element = tl.arange(0, HEAD_DIM)[None, :]
    source = (head * HEAD_DIM)[:, None] + element
    keys = tl.load(k + token * k_stride + source, mask=mask)
    values = tl.load(v + token * v_stride + source, mask=mask)
    head = head.to(tl.int64)[:, None]
    if k_scales is not None:
        keys, values = keys.to(tl.float32), values.to(tl.float32)
        k_scale, v_scale = scale_of(keys), scale_of(values)
        keys, values = quantized(keys, k_scale), quantized(values, v_scale)
        k_place = (block * k_block_stride + head * k_head_stride) // NUMBERS_IN_SCALE + place
        v_place = (block * v_block_stride + head * v_head_stride) // NUMBERS_IN_SCALE + place
        tl.store(k_scales + k_place, k_scale[:, None], mask=mask)
        tl.store(v_scales + v_place, v_scale[:, None], mask=mask)
    tl.store(k_cache + block * k_block_stride + place * k_slot_stride + head * k_head_stride + element, keys, mask=mask)
    tl.store(
        v_cache + block * v_block_stride + place * v_slot_stride + head * v_head_stride + element, values, mask=mask
    )


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Write k and v to the cache.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim] of the cache's dtype, unless that is int8; rows may have gaps, heads may not.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], with any strides but for the last dimension's, 1.
        slot_mapping: [num_tokens] int64: where each token is written, in slots of the cache; -1 is nowhere.
        k_scales, v_scales: those of an int8 cache: see `kv_int8.views`.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    assert head_dim == triton.next_power_of_2(head_dim), "head_dim must be a power of two"
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    assert k_cache.stride(3) == v_cache.stride(3) == 1
    assert slot_mapping.is_contiguous()
    if k_scales is not None and v_scales is not None:
        check_scales(k_cache, k_scales)
        check_scales(v_cache, v_scales)
    if not num_tokens:
        return
    heads = heads_of_a_group(head_dim)
    _write_kv_kernel[(num_tokens, triton.cdiv(num_kv_heads, heads))](
        k,
        v,
        slot_mapping,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        num_kv_heads,
        k.stride(0),
        v.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        BLOCK_SIZE=k_cache.shape[1],
        HEAD_DIM=head_dim,
        HEADS=heads,
        num_warps=NUM_WARPS,
    )


def launches() -> list[Launch]:
    """The configurations of the kernel."""
    strides = ("k_block_stride", "k_slot_stride", "k_head_stride", "v_block_stride", "v_slot_stride", "v_head_stride")
    return [
        Launch(
            name=f"write_kv, head_dim {head_dim}, {dtype}{', int8' * int8}",
            kernel=_write_kv_kernel,
            signature={
                **dict.fromkeys(("k", "v"), f"*{dtype}"),
                "slots": "*i64",
                **dict.fromkeys(("k_cache", "v_cache"), "*i8" if int8 else f"*{dtype}"),
                **dict.fromkeys(("k_scales", "v_scales"), "*fp32" if int8 else "constexpr"),
                **dict.fromkeys(("num_kv_heads", "k_stride", "v_stride", *strides), "i32"),
                **dict.fromkeys(("BLOCK_SIZE", "HEAD_DIM", "HEADS"), "constexpr"),
            },
            constants={
                "BLOCK_SIZE": block_size,
                "HEAD_DIM": head_dim,
                "HEADS": heads_of_a_group(head_dim),
                **({} if int8 else {"k_scales": None, "v_scales": None}),
            },
            num_warps=NUM_WARPS,
        )
        for dtype in ("bf16", "fp16", "fp32")
        for head_dim, block_size in ((16, 16), (128, 64), (256, 256))
        for int8 in (False, True)
    ]
