"""K and V of new tokens into the paged cache, as they are. It knows slots, not sequences."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

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
    tl.store(k_cache + block * k_block_stride + place * k_slot_stride + head * k_head_stride + element, keys, mask=mask)
    tl.store(
        v_cache + block * v_block_stride + place * v_slot_stride + head * v_head_stride + element, values, mask=mask
    )


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k and v to the cache.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim] of the cache's dtype; rows may have gaps, heads may not.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], with any strides but for the last dimension's, 1.
        slot_mapping: [num_tokens] int64: where each token is written, in slots of the cache; -1 is nowhere.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    assert head_dim == triton.next_power_of_2(head_dim), "head_dim must be a power of two"
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    assert k_cache.stride(3) == v_cache.stride(3) == 1
    assert slot_mapping.is_contiguous()
    if not num_tokens:
        return
    heads = heads_of_a_group(head_dim)
    _write_kv_kernel[(num_tokens, triton.cdiv(num_kv_heads, heads))](
        k,
        v,
        slot_mapping,
        k_cache,
        v_cache,
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
            name=f"write_kv, head_dim {head_dim}, {dtype}",
            kernel=_write_kv_kernel,
            signature={
                **dict.fromkeys(("k", "v"), f"*{dtype}"),
                "slots": "*i64",
                **dict.fromkeys(("k_cache", "v_cache"), f"*{dtype}"),
                **dict.fromkeys(("num_kv_heads", "k_stride", "v_stride", *strides), "i32"),
                **dict.fromkeys(("BLOCK_SIZE", "HEAD_DIM", "HEADS"), "constexpr"),
            },
            constants={"BLOCK_SIZE": block_size, "HEAD_DIM": head_dim, "HEADS": heads_of_a_group(head_dim)},
            num_warps=NUM_WARPS,
        )
        for dtype in ("bf16", "fp16", "fp32")
        for head_dim, block_size in ((16, 16), (128, 64), (256, 256))
    ]
