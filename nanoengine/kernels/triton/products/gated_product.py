"""The gate of a gated MLP inside the product that computes it, for steps of many rows: what is gated is neither written nor read.

Tiles are copied by the tensor memory accelerator. In large products, where warps are specialized (`launch.specializes_warps`),
four ask for copies, and two groups of four multiply.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoengine.kernels.reference.gates import ACTIVATIONS
from nanoengine.kernels.triton.attention.paged_cache import dot
from nanoengine.kernels.triton.launch import specializes_warps
from nanoengine.kernels.triton.products.activation import gated

ROWS = 128
TILE, LARGE_TILE = 64, 128
"""Gated values of a program; the large one is for so many rows that its programs fill the device several times."""

LARGE = 2048
"""Rows of which there have to be more for that."""

FEW = 256
"""Up to so many rows, memory is what a product waits for: no warps are specialized."""

DEPTH = 64
"""Inputs that are multiplied at a time."""


@triton.jit(do_not_specialize=["num_rows"])
def _gated_product_kernel(
    out,
    x,
    weight,
    num_rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):
    """Program (i, j): tile i of rows, tile j of gated values."""
    first, output = tl.program_id(0) * ROWS, tl.program_id(1) * TILE
    gate = tl.zeros([ROWS, TILE], tl.float32)
    up = tl.zeros([ROWS, TILE], tl.float32)
    for depth in tl.range(0, INPUTS, DEPTH, warp_specialize=SPECIALIZED, num_stages=STAGES):
        rows = x.load([first, depth])
        of_gates = weight.load([output, depth])
        gate = dot(rows, tl.trans(of_gates), gate)
        of_ups = weight.load([OUTPUTS + output, depth])
        up = dot(rows, tl.trans(of_ups), up)
    row = first + tl.arange(0, ROWS)
    offset = row.to(tl.int64)[:, None] * OUTPUTS + output + tl.arange(0, TILE)[None, :]
    tl.store(out + offset, gated(gate, up, ACTIVATION).to(out.dtype.element_ty), mask=(row < num_rows)[:, None])


def can_gate(x: Tensor, weight: Tensor) -> bool:
    """Whether `gated_product` computes these."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(0) * x.itemsize % 16 == 0
        and x.stride(1) == 1
        and x.data_ptr() % 16 == 0
        and weight.shape[1] % 8 == 0
        and weight.shape[0] % (2 * LARGE_TILE) == 0
    )


def gated_product(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """GATES[activation](gate, up) of x times the gates and x times the values beside them; sums are float32, rounded once.

    Args:
        x: [num_rows, inputs] of 16-bit numbers; rows may have gaps. `can_gate` says what else.
        weight: [2 * outputs, inputs] of that dtype: those of the gates, and then those of what they are multiplied with.
        activation: one of ACTIVATIONS.

    Returns:
        [num_rows, outputs], of the dtype of x.
    """
    (num_rows, inputs), outputs = x.shape, len(weight) // 2
    out = x.new_empty(num_rows, outputs)
    if not num_rows:
        return out
    tile, stages = (LARGE_TILE, 3) if num_rows > LARGE else (TILE, 4)
    specialized = num_rows > FEW and specializes_warps(x.device)
    _gated_product_kernel[(triton.cdiv(num_rows, ROWS), outputs // tile)](
        out,
        TensorDescriptor.from_tensor(x, [ROWS, DEPTH]),
        TensorDescriptor.from_tensor(weight, [tile, DEPTH]),
        num_rows,
        INPUTS=inputs,
        OUTPUTS=outputs,
        ROWS=ROWS,
        TILE=tile,
        DEPTH=DEPTH,
        STAGES=stages,
        ACTIVATION=ACTIVATIONS.index(activation),
        SPECIALIZED=specialized,
        num_warps=4 if specialized else 8,
        num_stages=stages,
    )
    return out
