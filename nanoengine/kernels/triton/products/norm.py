"""RMSNorm (Zhang and Sennrich, 2019) of rows, alone or after the addition of a residual: a program for each row. Of groups of
columns with a gate: a program for each group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.triton import dependent


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    eps,
    x_stride,
    residual_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Row i: with ADD, the residual becomes x + residual, and the norm is of that."""
    dependent.start(LAUNCH)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    factors = tl.load(weight + column, mask=mask, other=0.0)
    dependent.wait(LAUNCH)
    values = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        pointers = residual + row * residual_stride + column
        total = values + tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        rounded = total.to(residual.dtype.element_ty)
        tl.store(pointers, rounded, mask=mask)
        values = rounded.to(tl.float32)  # the norm of what the next layer gets
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / SIZE + eps)
    tl.store(out + row * SIZE + column, (values * scale * factors).to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, launch: int = 0) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32.

    Args:
        x: [..., size]; the last dimension is contiguous.
        weight: [size] float32.
        eps: is added to the mean of the squares.
        launch: see `dependent.py`.

    Returns:
        [..., size], of the dtype of x.
    """
    return _launch(x, None, weight, eps, launch)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, launch: int = 0) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), where the sum is rounded to its dtype first, and is written over the residual.

    The residual is like x, and overwritten: its leading dimensions must be those of one list of rows.
    """
    return _launch(x, residual, weight, eps, launch), residual


@triton.jit
def _gated_norm_kernel(
    x,
    gate,
    weight,
    out,
    eps,
    gate_stride,
    width,
    WEIGHTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE_FIRST: tl.constexpr,
):
    """Program (i, j): group j of row i."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUP
    column = tl.arange(0, BLOCK)
    mask = column < GROUP
    value = tl.load(x + row * width + first + column, mask=mask, other=0.0)
    gates = tl.load(gate + row * gate_stride + first + column, mask=mask, other=0.0).to(tl.float32)
    gates = gates / (1.0 + tl.exp(-gates))
    if GATE_FIRST:
        value *= gates
    scale = 1.0 / tl.sqrt(tl.sum(value * value) / GROUP + eps)
    value = value * scale * tl.load(weight + (first + column) % WEIGHTS, mask=mask, other=0.0)
    if not GATE_FIRST:
        value *= gates
    tl.store(out + row * width + first + column, value.to(out.dtype.element_ty), mask=mask)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, gate_first: bool) -> Tensor:
    """As in `kernels/recurrences.py`."""
    rows, width = x.shape
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    out = torch.empty((rows, width), dtype=gate.dtype, device=x.device)
    _gated_norm_kernel[(rows, width // group)](
        x,
        gate,
        weight,
        out,
        eps,
        gate.stride(0),
        width,
        WEIGHTS=len(weight),
        GROUP=group,
        BLOCK=triton.next_power_of_2(group),
        GATE_FIRST=gate_first,
        num_warps=_num_warps(group),
    )
    return out


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, launch: int) -> Tensor:
    size = x.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return out
    rows = x.reshape(-1, size)
    residual_rows = rows if residual is None else residual.view(-1, size)
    assert rows.stride(1) == residual_rows.stride(1) == 1
    _rms_norm_kernel[(len(rows),)](
        rows,
        residual_rows,
        weight,
        out,
        eps,
        rows.stride(0),
        residual_rows.stride(0),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        ADD=residual is not None,
        LAUNCH=launch,
        num_warps=_num_warps(size),
        **dependent.options(launch),
    )
    return out


def _num_warps(size: int) -> int:
    """8 to 16 values for each thread, and few warps to wait for each other where rows are short."""
    return min(16, max(1, triton.next_power_of_2(size) // 512))
