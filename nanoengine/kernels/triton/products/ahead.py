"""Weights that come into the L2 cache ahead of the products that read them, while memory has little else to do.

Between a product of q, k and v and that of attention's outputs little is read in a step of few rows: its time goes by with one
kernel's waiting for the other. So the programs of the first product, as they end, ask for the weights of those that come next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.triton.attention.paged_cache import INTERPRETED

MOST = 2
"""Weights that a product prefetches."""

PIECES = tl.constexpr(8)
"""Pieces of the slice that a program prefetches, one for each thread."""


@triton.jit
def prefetch(pointers, counts):
    """Ask for so many elements behind each pointer, a multiple of 16 bytes that begins at one; for none if it is not positive.

    A thread asks at a time, all others of its warp after it: a few large pieces are quicker than many small ones.
    """
    sizes = counts * (pointers.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointers, sizes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_slice(weight, COUNT: tl.constexpr):
    """Ask for the COUNT elements of a weight that are as far along as this program, of 128 threads, is among all programs."""
    if COUNT and not INTERPRETED:
        PIECE: tl.constexpr = COUNT // PIECES
        piece = tl.arange(0, 128)
        start = weight + tl.program_id(0).to(tl.int64) * COUNT
        prefetch(start + tl.minimum(piece, PIECES - 1) * PIECE, tl.where(piece < PIECES, PIECE, 0))


def prefetch_args(weights: Sequence[Tensor], programs: int, launch: int) -> tuple[Any, ...]:
    """MOST weights, and how many elements of each one of so many programs prefetches; None and 0, where there are none."""
    counts = [elements_of_slice(weight, programs, launch) for weight in weights[:MOST]]
    fitting = [weight for weight, count in zip(weights, counts, strict=False) if count]
    missing = MOST - len(fitting)
    return (*fitting, *[None] * missing, *[count for count in counts if count], *[0] * missing)


def elements_of_slice(weight: Tensor, programs: int, launch: int) -> int:
    """How many elements of a weight one of so many programs prefetches.

    A piece is a multiple of 16 bytes, rounded down: what is left of a weight is read when it is needed. Launches that depend on
    none ask for nothing: they may be those of a GPU that cannot (before compute capability 9.0).
    """
    unit = 16 * PIECES.value // weight.element_size()
    return weight.numel() // programs // unit * unit if launch and weight.data_ptr() % 16 == 0 else 0
