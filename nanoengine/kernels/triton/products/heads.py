"""The product of q, k and v of one to four rows, and all that happens to its heads before attention, in one kernel.

The last program of a head, by a count, has all its numbers: it norms and rotates them, and writes K and V. So attention waits for
one kernel less. What is rounded is what two kernels would round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.operations import Changes
from nanoengine.kernels.triton import dependent
from nanoengine.kernels.triton.attention.paged_cache import PagedCache
from nanoengine.kernels.triton.attention.rotate_and_write import arguments, rotate_and_write_kernel
from nanoengine.kernels.triton.products.ahead import prefetch_args, prefetch_slice
from nanoengine.kernels.triton.products.gemv import MOST_ROWS, NUM_WARPS, gemv_kernel, sizes_of
from nanoengine.kernels.triton.workspace import Workspace


@triton.jit
def _heads_kernel(
    arrivals,
    x,
    residual,
    norm_weight,
    weight,
    bias,
    out,
    new_residual,
    norm_eps,
    first_ahead,
    second_ahead,
    FIRST_COUNT: tl.constexpr,
    SECOND_COUNT: tl.constexpr,
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
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    HELD: tl.constexpr,
    ADD: tl.constexpr,
    INPUT_NORM: tl.constexpr,
    BIAS: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Program i: outputs [i * TILE, (i + 1) * TILE) of all rows, and if it is the last of its head, that head of all rows.

    `out`, of which q, k and v are parts, is what the programs of a head leave to the last of them. `arrivals` has a count for
    each head, zeros between two launches.
    """
    gemv_kernel(
        x, residual, norm_weight, weight, bias, out, new_residual, norm_eps, None, None, 0, 0, ROWS, INPUTS, OUTPUTS, TILE,
        CHUNK, HELD, ADD, INPUT_NORM, False, 0, BIAS, LAUNCH,
    )  # fmt: skip
    PROGRAMS: tl.constexpr = HEAD_DIM // TILE  # of a head
    head = tl.program_id(0) // PROGRAMS
    # One thread counts for all: before it does, all have stored; then all see what others stored before they counted.
    tl.debug_barrier()
    if tl.atomic_add(arrivals + head, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
        tl.store(arrivals + head, 0)  # nobody else comes before the next launch
        for row in tl.static_range(ROWS):
            rotate_and_write_kernel(
                q, k, v, q_weight, k_weight, eps, cos, sin, slots, q_out, k_out, k_cache, v_cache, k_scales, v_scales, num_heads,
                num_kv_heads, q_stride, k_stride, v_stride, q_out_stride, angle_stride, k_block_stride, k_slot_stride,
                k_head_stride, v_block_stride, v_slot_stride, v_head_stride, BLOCK_SIZE, HEAD_DIM, 1, NORM, ROTATE, LAUNCH, row,
                head,
            )  # fmt: skip
    prefetch_slice(first_ahead, FIRST_COUNT)
    prefetch_slice(second_ahead, SECOND_COUNT)


def can_count_heads(inputs: int, outputs: int, head_dim: int, itemsize: int) -> bool:
    """Whether the programs of such a product share no head with another."""
    return head_dim % sizes_of(inputs, outputs, itemsize)["TILE"] == 0


def heads_of_product(
    x: Tensor,
    weight: Tensor,
    workspace: Workspace,
    changes: Changes,
    cache: PagedCache,
    slot_mapping: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    launch: int = 0,
    ahead: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """`gemv`, and `rotate_and_write` of that: (q, x + residual, or x if there is no residual).

    Args:
        x, weight, bias, residual, norm, eps, ahead: those of `gemv`, where `can_count_heads` holds.
        workspace: of the engine; no other launch may use it at the same time.
        changes, cache, slot_mapping: those of `rotate_and_write`; the cache is not int8, for which programs would need so many
            registers that they do not all run side by side.
        launch: see `dependent.py`.
    """
    (num_rows, inputs), outputs, (num_kv_heads, head_dim) = x.shape, len(weight), cache.k.shape[2:]
    assert num_rows <= MOST_ROWS
    assert weight.is_contiguous()
    assert residual is None or (residual.is_contiguous() and norm is not None)
    x = x.contiguous()
    out = x.new_empty(num_rows, outputs)
    num_heads = outputs // head_dim - 2 * num_kv_heads
    queries, k, v = out.unflatten(1, (-1, head_dim)).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    q = x.new_empty(num_rows, num_heads, head_dim)
    total = x if residual is None else torch.empty_like(x)
    if not num_rows:
        return q, total
    sizes = sizes_of(inputs, outputs, weight.element_size())
    programs = outputs // sizes["TILE"]
    args, sizes_of_heads = arguments(queries, k, v, changes, slot_mapping, q, None, cache)
    _heads_kernel[(programs,)](
        workspace.counters(outputs // head_dim, x.device),
        *(x, residual, norm, weight, bias, out, total, eps, *prefetch_args(ahead, programs, launch)),
        *args,
        **sizes_of_heads,
        ROWS=num_rows,
        INPUTS=inputs,
        OUTPUTS=outputs,
        **sizes,
        ADD=residual is not None,
        INPUT_NORM=norm is not None,
        BIAS=bias is not None,
        LAUNCH=launch,
        num_warps=NUM_WARPS,
        **dependent.options(launch),
    )
    return q, total
