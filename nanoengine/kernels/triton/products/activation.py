"""The gate of SwiGLU and its kin (`kernels/reference/gates.py`), and those of attention and of shared experts, element by
element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.reference.gates import ACTIVATIONS
from nanoengine.kernels.triton import dependent

BLOCK = 1024
"""Columns of a program."""

NUM_WARPS = 4


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """What a gate makes of the value beside it, both float32; activations are numbered as in ACTIVATIONS."""
    if ACTIVATION == 3:
        return tl.where(gate < 0.0, 0.0, gate) * up  # NaN stays NaN
    slope = gate
    if ACTIVATION == 1:  # (1 + tanh(y)) / 2 is the sigmoid of 2 y; sqrt(8 / pi) is 1.59576912
        slope = gate * (gate * gate * 0.044715 + 1.0) * 1.59576912
    if ACTIVATION == 2:
        gate = tl.where(gate > 7.0, 7.0, gate)  # NaN stays NaN
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        slope = gate * 1.702
    return gate / (1.0 + tl.exp(-slope)) * up


@triton.jit
def _gate_and_multiply_kernel(
    gate_up, out, width, stride, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, LAUNCH: tl.constexpr
):
    """Program (i, j): block j of row i."""
    dependent.start(LAUNCH)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    source = gate_up + row * stride + column
    dependent.wait(LAUNCH)
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, gated(gate, up, ACTIVATION).to(out.dtype.element_ty), mask=mask)


def gate_and_multiply(gate_up: Tensor, activation: str, launch: int = 0) -> Tensor:
    """GATES[activation](gate, up), computed in float32 and rounded once.

    Args:
        gate_up: [n, 2 * width], the gate and then what it changes; rows may have gaps.
        activation: one of ACTIVATIONS.
        launch: see `dependent.py`.

    Returns:
        [n, width], of the same dtype.
    """
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = gate_up.new_empty(n, width)
    if out.numel():
        grid = (n, triton.cdiv(width, BLOCK))
        _gate_and_multiply_kernel[grid](
            gate_up,
            out,
            width,
            gate_up.stride(0),
            BLOCK=BLOCK,
            ACTIVATION=ACTIVATIONS.index(activation),
            LAUNCH=launch,
            num_warps=NUM_WARPS,
            **dependent.options(launch),
        )
    return out


@triton.jit
def _sigmoid_gate_kernel(x, gate, out, width, x_stride, gate_stride, BLOCK: tl.constexpr, IS_ONE: tl.constexpr):
    """Program (i, j): block j of row i."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    value = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if IS_ONE:
        by = tl.load(gate + row * gate_stride).to(tl.float32)
    else:
        by = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (value / (1.0 + tl.exp(-by))).to(out.dtype.element_ty), mask=mask)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """As in `kernels/recurrences.py`."""
    rows, width = x.shape
    is_one = gate.shape[1] == 1
    assert x.stride(1) == 1 or width == 1
    assert gate.stride(1) == 1 or is_one
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    sizes = width, x.stride(0), gate.stride(0)
    grid = (rows, triton.cdiv(width, BLOCK))
    _sigmoid_gate_kernel[grid](x, gate, out, *sizes, BLOCK=BLOCK, IS_ONE=is_one, num_warps=NUM_WARPS)
    return out
