"""The product of q, k and v of one to four rows, and all that happens to its heads before attention, in one kernel.

The last program of a head, by a count, has all its numbers: it norms and rotates them, and writes K and V. So attention waits for
one kernel less. What is rounded is what two kernels would round.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.operations import Changes
from nanoengine.kernels.triton.attention.paged_cache import PagedCache
from nanoengine.kernels.triton.attention.rotate_and_write import arguments as arguments_of_heads
from nanoengine.kernels.triton.attention.rotate_and_write import rotate_and_write_kernel
from nanoengine.kernels.triton.products.ahead import prefetch_args, prefetch_slice
from nanoengine.kernels.triton.products.fusion import Fusion
from nanoengine.kernels.triton.products.gemv import arguments as arguments_of_product
from nanoengine.kernels.triton.products.gemv import gemv_kernel, sizes_of
from nanoengine.kernels.triton.workspace import Workspace


@triton.jit
def _heads_kernel(
    arrivals,
    of_product,
    first_ahead,
    second_ahead,
    FIRST_COUNT: tl.constexpr,
    SECOND_COUNT: tl.constexpr,
    of_heads,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM_HEADS: tl.constexpr,
    ROTATE: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    HELD: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Program i: outputs [i * TILE, (i + 1) * TILE) of all rows, and if it is the last of its head, that head of all rows.

    `of_product` and `of_heads` are arguments of the two kernels whose work it does. `out` of the product, of which q, k and v are
    parts, is what the programs of a head leave to the last of them. `arrivals` has a count for each head, zeros between two
    launches.
    """
    gemv_kernel(
        *of_product,
        *(None, None, 0, 0),
        *(ROWS, INPUTS, OUTPUTS, TILE, CHUNK, HELD, ADD, NORM, GATE, ACTIVATION, BIAS, LAUNCH),
    )
    PROGRAMS: tl.constexpr = HEAD_DIM // TILE  # of a head
    head = tl.program_id(0) // PROGRAMS
    # One thread counts for all: before it does, all have stored; then all see what others stored before they counted.
    tl.debug_barrier()
    if tl.atomic_add(arrivals + head, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
        tl.store(arrivals + head, 0)  # nobody else comes before the next launch
        for row in tl.static_range(ROWS):
            rotate_and_write_kernel(*of_heads, BLOCK_SIZE, HEAD_DIM, 1, NORM_HEADS, ROTATE, LAUNCH, row, head)
    prefetch_slice(first_ahead, FIRST_COUNT)
    prefetch_slice(second_ahead, SECOND_COUNT)


def can_count_heads(inputs: int, outputs: int, head_dim: int, itemsize: int) -> bool:
    """Whether the programs of such a product share no head with another."""
    return head_dim % sizes_of(inputs, outputs, itemsize)["TILE"] == 0


def heads_of_product(
    x: Tensor,
    weight: Tensor,
    fusion: Fusion,
    workspace: Workspace,
    changes: Changes,
    cache: PagedCache,
    slot_mapping: Tensor,
    ahead: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """`gemv`, and `rotate_and_write` of that: (q, x + residual, or x if there is no residual).

    Args:
        x, weight, fusion, ahead: those of `gemv`, where `can_count_heads` holds; without gates.
        workspace: of the engine; no other launch may use it at the same time.
        changes, cache, slot_mapping: those of `rotate_and_write`; the cache is not int8, for which programs would need so many
            registers that they do not all run side by side.
    """
    num_kv_heads, head_dim = cache.k.shape[2:]
    out, total, of_product, constants = arguments_of_product(x, weight, fusion)
    num_heads = len(weight) // head_dim - 2 * num_kv_heads
    queries, k, v = out.unflatten(1, (-1, head_dim)).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    q = queries.new_empty(queries.shape)
    if len(x):
        programs = len(weight) // constants["TILE"]
        of_heads, constants_of_heads = arguments_of_heads(queries, k, v, changes, slot_mapping, q, None, cache)
        _heads_kernel[(programs,)](
            workspace.counters(len(weight) // head_dim, x.device),
            of_product,
            *prefetch_args(ahead, programs, fusion.launch),
            of_heads,
            **constants_of_heads,
            **constants,
        )
    return q, total
