"""Products of few rows, in one kernel with the addition and the norm before them and the gate behind them.

A decode step of few sequences reads every weight once, and waits for memory. What stands around a product is small, but as
kernels of its own it costs as much time as the product: here every program does it for itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from nanoengine.kernels.gates import ACTIVATIONS
from nanoengine.kernels.triton.activation import gated
from nanoengine.kernels.triton.launch import Launch
from nanoengine.kernels.triton.paged_cache import dot

ROWS = 8
"""Rows that a program computes, the least that tensor cores multiply. Those that are not there are zeros."""

MANY_OUTPUTS = 1 << 15
"""From so many outputs on there is work for all multiprocessors in larger tiles, too."""

NUM_WARPS = 4
NUM_STAGES = 4


@triton.jit
def _load_rows(
    x: tl.tensor,
    residual: tl.tensor,
    place: tl.tensor,
    mask: tl.tensor,
    ADD: tl.constexpr,
) -> tl.tensor:
    """Elements of x, or of x + residual, rounded to their dtype; as float32."""
    values = tl.load(x + place, mask=mask, other=0.0)
    if ADD:
        total = values.to(tl.float32) + tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        values = total.to(x.dtype.element_ty)
    return values.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    new_residual: tl.tensor,
    eps: tl.tensor,
    num_rows: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    NORM_DEPTH: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program i: outputs [i * TILE, (i + 1) * TILE) of all rows; weights are read DEPTH inputs at a time, rows for the norm
    NORM_DEPTH at a time.
    """
    output = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row, step = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    has_row = (row < num_rows)[:, None]
    has_output = (output < OUTPUTS)[:, None]
    if DEPENDENT:  # the kernel before may still write what this one reads, or read where it writes
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()

    scale = tl.full([ROWS], 1.0, tl.float32)
    if NORM:
        squares = tl.zeros([ROWS, NORM_DEPTH], tl.float32)
        for first in range(0, INPUTS, NORM_DEPTH):
            column = first + tl.arange(0, NORM_DEPTH)
            place = row[:, None] * INPUTS + column[None, :]
            mask = has_row & (column < INPUTS)[None, :]
            values = _load_rows(x, residual, place, mask, ADD)
            squares += values * values
            if ADD and tl.program_id(0) == 0:  # not in the residual's own place: other programs still read it
                tl.store(new_residual + place, values.to(x.dtype.element_ty), mask=mask)
        scale = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / INPUTS + eps)

    acc = tl.zeros([TILE, ROWS], tl.float32)
    gate = tl.zeros([TILE, ROWS], tl.float32)
    for first in range(0, INPUTS, DEPTH):
        column = first + step
        present = (column < INPUTS)[None, :]
        values = _load_rows(x, residual, row[:, None] * INPUTS + column[None, :], has_row & present, ADD)
        if NORM:
            factor = tl.load(norm_weight + column, mask=column < INPUTS, other=0.0)
            values = values * scale[:, None] * factor[None, :]
        turned = tl.trans(values.to(x.dtype.element_ty))
        source = weight + output.to(tl.int64)[:, None] * INPUTS + column[None, :]
        weights = tl.load(source, mask=has_output & present, other=0.0)
        if GATE:  # the weights of the gates, and then those of what they are multiplied with
            ups = tl.load(source + OUTPUTS * INPUTS, mask=has_output & present, other=0.0)
            gate = dot(weights, turned, gate)
            acc = dot(ups, turned, acc)
        else:
            acc = dot(weights, turned, acc)
    if GATE:
        acc = gated(gate, acc, ACTIVATION)
    if BIAS:
        acc += tl.load(bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
    target = out + row[None, :] * OUTPUTS + output[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=has_output & (row < num_rows)[None, :])


def product_of_few_rows(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    dependent: bool = False,
) -> tuple[Tensor, Tensor]:
    """rms_norm(x + residual) W^T + bias, or the gate of it; the norm and each of the others only if they are given.

    Sums are float32. x + residual and its norm are rounded to the dtype of x, as they are between kernels of their own; gates are
    not rounded before they are multiplied.

    Args:
        x: [num_rows, inputs], at most `ROWS` rows.
        weight: [outputs, inputs]; for gates those of the gates, and then those of what they are multiplied with.
        bias: [outputs]; gates have none.
        residual: like x; left as it is. It needs a norm.
        norm: [inputs] float32, the weight of the norm; `eps` is added to the mean of the squares.
        activation: by which the first half of the outputs gates the second; without one there are no gates.
        out_dtype: that of x, if not given.
        dependent: launch it while the kernel before it ends (compute capability 9.0 and later).

    Returns:
        [num_rows, outputs], or half as wide for gates; and x + residual, or x if there is no residual.
    """
    num_rows, inputs = x.shape
    outputs = weight.shape[0] if activation is None else weight.shape[0] // 2
    assert num_rows <= ROWS
    assert weight.is_contiguous()
    assert residual is None or (residual.is_contiguous() and norm is not None)
    x = x.contiguous()
    out = x.new_empty(num_rows, outputs, dtype=out_dtype or x.dtype)
    total = x if residual is None else torch.empty_like(x)
    if not num_rows:
        return out, total
    tile, depth = _shape(x.dtype, inputs, outputs)
    options = {"launch_pdl": True} if dependent else {}
    _few_rows_kernel[(triton.cdiv(outputs, tile),)](
        x,
        residual,
        norm,
        weight,
        bias,
        out,
        total,
        eps,
        num_rows,
        INPUTS=inputs,
        OUTPUTS=outputs,
        ROWS=ROWS,
        TILE=tile,
        DEPTH=depth,
        NORM_DEPTH=_norm_depth(inputs),
        ADD=residual is not None,
        NORM=norm is not None,
        GATE=activation is not None,
        ACTIVATION=0 if activation is None else ACTIVATIONS.index(activation),
        BIAS=bias is not None,
        DEPENDENT=dependent,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        **options,
    )
    return out, total


def _shape(dtype: torch.dtype, inputs: int, outputs: int) -> tuple[int, int]:
    """Outputs of a program, and inputs that it reads at a time: about 8 KB of weights, four times in flight."""
    if dtype is torch.float32:  # exact products take no tensor cores, and the registers of all threads
        return 16, min(64, max(16, triton.next_power_of_2(inputs)))
    if outputs >= MANY_OUTPUTS:
        return 64, min(128, max(16, triton.next_power_of_2(inputs)))
    return 16, min(256, max(16, triton.next_power_of_2(inputs)))


def _norm_depth(inputs: int) -> int:
    """All of a row if it is short: nothing hides the time that its numbers take to come."""
    return min(1024, triton.next_power_of_2(inputs))


def launches() -> list[Launch]:
    """The products of a model of 1,024 dimensions, and some of one whose sizes are no powers of two."""
    types = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    found = []
    cases: list[tuple[str, int, int, dict[str, int]]] = [
        ("qkv", 1024, 4096, {"ADD": True, "NORM": True}),
        ("first qkv", 1024, 4096, {"NORM": True, "BIAS": True}),
        ("out", 2048, 1024, {}),
        ("gate and up", 1024, 3072, {"ADD": True, "NORM": True, "GATE": True}),
        ("GELU's gate and up", 640, 2048, {"NORM": True, "GATE": True, "ACTIVATION": ACTIVATIONS.index("gelu_tanh")}),
        ("logits", 1024, 151936, {}),
        ("ragged", 1000, 2500, {"ADD": True, "NORM": True, "BIAS": True}),
    ]
    for dtype, type_name in types.items():
        for name, inputs, outputs, flags in cases if dtype is torch.bfloat16 else cases[:6]:
            for dependent in (False, True) if (dtype, name) in ((torch.bfloat16, "qkv"),) else (False,):
                tile, depth = _shape(dtype, inputs, outputs)
                constants = {
                    "INPUTS": inputs,
                    "OUTPUTS": outputs,
                    "ROWS": ROWS,
                    "TILE": tile,
                    "DEPTH": depth,
                    "NORM_DEPTH": _norm_depth(inputs),
                    **dict.fromkeys(("ADD", "NORM", "GATE", "BIAS"), False),
                    "ACTIVATION": 0,
                    **flags,
                    "DEPENDENT": dependent,
                }
                vectors = ("x", "residual", "norm_weight", "weight", "bias", "out", "new_residual")
                signature = {
                    **dict.fromkeys(vectors, f"*{type_name}"),
                    "eps": "fp32",
                    "num_rows": "i32",
                    "norm_weight": "*fp32",
                    **dict.fromkeys(constants, "constexpr"),
                }
                if name == "logits":
                    signature["out"] = "*fp32"
                label = f"few_rows {name} {type_name}{' dependent' * dependent}"
                least = 90 if dependent else 80
                found.append(Launch(label, _few_rows_kernel, signature, constants, NUM_WARPS, NUM_STAGES, least))
    return found
