"""Causal attention of one prompt without history: all that its tokens see are its tokens, whose K and V lie one after the other.

A tile of them is one copy of the tensor memory accelerator. Where warps are specialized (`launch.specializes_warps`), four ask
for copies, and two groups of four multiply. Blocks of a paged cache are too small for such copies.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoengine.kernels.triton.attention.paged_cache import dot, softmax_part
from nanoengine.kernels.triton.launch import specializes_warps

ROWS = 128
"""Tokens of a program, each with one query head."""

SPECIALIZED_WARPS, NUM_WARPS = 4, 8
"""With eight, Triton specializes no warp, and says nothing of it."""

HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)


@triton.jit(do_not_specialize=["num_tokens"])
def _whole_prompt_kernel(
    out,
    queries,
    keys,
    values,
    num_tokens,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):
    """Program (i, t): query head i of tile t from the end, of ROWS tokens. `scale` has log2(e) in it.

    Triton specializes warps of one loop, with nothing in it but copies by descriptors: so there is one, and all of its tiles are
    masked.
    """
    head = tl.program_id(0)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS  # the late ones see most, and so they begin
    column = head // GROUP * HEAD_DIM
    query = queries.load([first, head * HEAD_DIM])
    row, step = tl.arange(0, ROWS), tl.arange(0, TILE)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    for at in tl.range(0, tl.minimum(first + ROWS, num_tokens), TILE, warp_specialize=SPECIALIZED, num_stages=STAGES):
        k = keys.load([at, column])
        scores = dot(query, tl.trans(k), tl.zeros([ROWS, TILE], tl.float32))
        visible = at - first + step[None, :] <= row[:, None]
        weights, shrink, highest = softmax_part(scores, visible, highest, scale, 0.0)
        total = total * shrink + tl.sum(weights, axis=1)
        v = values.load([at, column])
        acc = dot(weights.to(v.dtype), v, acc * shrink[:, None])
    token = first + row
    offset = (token.to(tl.int64) * tl.num_programs(0) + head)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(out + offset, (acc / total[:, None]).to(out.dtype.element_ty), mask=(token < num_tokens)[:, None])


def can_attend(q: Tensor) -> bool:
    """Whether `whole_prompt` computes with such queries, [num_tokens, num_heads, head_dim]."""
    return q.dtype in DTYPES and q.shape[2] in HEAD_DIMS and q.stride(0) % 8 == 0 and q.data_ptr() % 16 == 0


def keys_and_values(q: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor] | None:
    """K and V that stand behind the queries of each token, as `rotate_and_write` leaves them in place; None: q stands alone.

    Args:
        q: [num_tokens, num_heads, head_dim]: the first columns of rows that hold all heads of q, of k and of v; or anything else.

    Returns:
        Views, [num_tokens, num_kv_heads, head_dim].
    """
    num_tokens, num_heads, head_dim = q.shape
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if q.stride() != (width, head_dim, 1):
        return None
    first = q.storage_offset() + num_heads * head_dim
    shape = num_tokens, num_kv_heads, head_dim
    k, v = (q.as_strided(shape, q.stride(), first + i * num_kv_heads * head_dim) for i in range(2))
    return k, v


def whole_prompt(q: Tensor, k: Tensor, v: Tensor, scale: float, tile: int) -> Tensor:
    """Attention of each token over the tokens up to itself.

    Args:
        q: [num_tokens, num_heads, head_dim], 16-bit numbers; head_dim is one of HEAD_DIMS.
        k, v: [num_tokens, num_kv_heads, head_dim]; rows of all three may have gaps, heads may not, and all begins at multiples of
            16 bytes.
        scale: factor of the scores, before the softmax; above 0.
        tile: tokens of K and of V that are multiplied at once: 64 or 128.

    Returns:
        [num_tokens, num_heads, head_dim], of the dtype of q; sums are float32.
    """
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    stages, specialized = 2 if tile == 128 else 3, specializes_warps(q.device)
    _whole_prompt_kernel[(num_heads, triton.cdiv(num_tokens, ROWS))](
        out,
        _descriptor(q, ROWS),
        _descriptor(k, tile),
        _descriptor(v, tile),
        num_tokens,
        scale * math.log2(math.e),
        GROUP=num_heads // k.shape[1],
        HEAD_DIM=head_dim,
        ROWS=ROWS,
        TILE=tile,
        STAGES=stages,
        SPECIALIZED=specialized,
        num_warps=SPECIALIZED_WARPS if specialized else NUM_WARPS,
        num_stages=stages,
    )
    return out


def _descriptor(heads: Tensor, rows: int) -> TensorDescriptor:
    """Of a copy of so many rows of one head. Rows beyond the last one are zeros."""
    head_dim = heads.shape[2]
    assert heads.stride()[1:] == (head_dim, 1)
    return TensorDescriptor.from_tensor(heads.flatten(1), [rows, head_dim])
