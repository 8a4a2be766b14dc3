"""Products of few rows, in one kernel with the addition and the norm before them and the gate behind them.

A decode step of few sequences reads every weight once, and waits for memory. What stands around a product is small, but as
a separate kernel it costs as much time as the product: here every program does it for itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.triton import dependent
from nanoengine.kernels.triton.attention.paged_cache import dot
from nanoengine.kernels.triton.products.activation import gated
from nanoengine.kernels.triton.products.fusion import Fusion
from nanoengine.kernels.triton.products.packed import NUMBERS, PackedWeight, column_of, numbers_of, scales_of

ROWS = 8
"""Rows that a program computes, the least that tensor cores multiply. Those that are not there are zeros."""

MOST_ROWS = 64
"""Rows of a program that multiplies packed numbers: for more, they are better dequantized once for all."""

MANY_OUTPUTS = 1 << 15
"""From so many outputs on there is work for all multiprocessors in larger tiles, too."""

NUM_WARPS = 4
NUM_STAGES = 4


@triton.jit
def _load_rows(x, residual, offset, mask, ADD: tl.constexpr):
    """Elements of x, or of x + residual, rounded to their dtype; as float32."""
    values = tl.load(x + offset, mask=mask, other=0.0)
    if ADD:
        total = values.to(tl.float32) + tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
        values = total.to(x.dtype.element_ty)
    return values.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x,
    residual,
    norm_weight,
    weight,
    scales,
    zeros,
    bias,
    out,
    new_residual,
    eps,
    num_rows,
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
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    ZEROS: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Program i: outputs [i * TILE, (i + 1) * TILE) of all rows; weights are read DEPTH inputs at a time, rows for the norm
    NORM_DEPTH at a time. With BITS weights are packed, and read DEPTH bytes at a time; without, they are numbers.
    """
    dependent.start(LAUNCH)
    output = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row, step = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    has_row = (row < num_rows)[:, None]
    has_output = (output < OUTPUTS)[:, None]
    dependent.wait(LAUNCH)

    scale_of_row = tl.full([ROWS], 1.0, tl.float32)
    if NORM:
        squares = tl.zeros([ROWS, NORM_DEPTH], tl.float32)
        for first in range(0, INPUTS, NORM_DEPTH):
            column = first + tl.arange(0, NORM_DEPTH)
            offset = row[:, None] * INPUTS + column[None, :]
            mask = has_row & (column < INPUTS)[None, :]
            values = _load_rows(x, residual, offset, mask, ADD)
            squares += values * values
            if ADD and tl.program_id(0) == 0:  # not over the residual: other programs still read it
                tl.store(new_residual + offset, values.to(x.dtype.element_ty), mask=mask)
        scale_of_row = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / INPUTS + eps)

    HALVES: tl.constexpr = 2 if BITS == 4 else 1  # inputs in a byte of a weight
    WIDTH: tl.constexpr = INPUTS // HALVES
    acc = tl.zeros([TILE, ROWS], tl.float32)
    gate = tl.zeros([TILE, ROWS], tl.float32)
    for first in range(0, WIDTH, DEPTH):
        offset = first + step
        mask = has_output & (offset < WIDTH)[None, :]
        source = weight + output.to(tl.int64)[:, None] * WIDTH + offset[None, :]
        stored = tl.load(source, mask=mask, other=0)
        scale, zero = scales_of(scales, zeros, output, first, has_output, BITS, GROUPS, ZEROS, WIDTH, TILE, DEPTH)
        if GATE:  # the weights of the gates, and then those of what they are multiplied with
            up_stored = tl.load(source + OUTPUTS * WIDTH, mask=mask, other=0)
            up_scale, up_zero = scales_of(
                scales, zeros, output + OUTPUTS, first, has_output, BITS, GROUPS, ZEROS, WIDTH, TILE, DEPTH
            )
        for half in tl.static_range(HALVES):
            column = column_of(offset, half, BITS)
            present = (column < INPUTS)[None, :]
            values = _load_rows(x, residual, row[:, None] * INPUTS + column[None, :], has_row & present, ADD)
            if NORM:
                factor = tl.load(norm_weight + column, mask=column < INPUTS, other=0.0)
                values = values * scale_of_row[:, None] * factor[None, :]
            turned = tl.trans(values.to(x.dtype.element_ty))
            weights = stored
            if BITS:
                weights = numbers_of(stored, scale, zero, half, BITS).to(x.dtype.element_ty)
            if GATE:
                ups = up_stored
                if BITS:
                    ups = numbers_of(up_stored, up_scale, up_zero, half, BITS).to(x.dtype.element_ty)
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


def product_of_few_rows(x: Tensor, weight: Tensor | PackedWeight, fusion: Fusion) -> tuple[Tensor, Tensor]:
    """A product of a few rows, and what is fused with it.

    Sums are float32. x + residual and its norm are rounded to the dtype of x, as they are between separate kernels; gates are
    not rounded before they are multiplied, and numbers of a packed weight are, to the dtype of x.

    Args:
        x: [num_rows, inputs], at most `ROWS` rows; with a packed weight and no norm `most_rows`.
        weight: [outputs, inputs]; for gates those of the gates, and then those of what they are multiplied with.

    Returns:
        [num_rows, outputs], or half as wide for gates; and x + residual, or x if there is no residual.
    """
    num_rows, inputs = x.shape
    outputs = weight.shape[0] // fusion.sets
    packed = weight if isinstance(weight, PackedWeight) else None
    assert num_rows <= (ROWS if packed is None or fusion.norm is not None else most_rows(x.dtype))
    assert packed is not None or weight.is_contiguous()  # type: ignore[union-attr]
    x = x.contiguous()
    out, total = fusion.results(x, outputs)
    if not num_rows:
        return out, total
    rows = max(ROWS, triton.next_power_of_2(num_rows))
    form = packed.form if packed else NUMBERS
    constants = _constants(x.dtype, inputs, outputs, rows, form, has_gate=fusion.activation is not None)
    weights = (packed.numbers, packed.scales, packed.zeros) if packed else (weight, None, None)
    _few_rows_kernel[(triton.cdiv(outputs, constants["TILE"]),)](
        *fusion.arguments(x, out, total, *weights),
        num_rows,
        **constants,
        **fusion.before(),
        **fusion.behind(),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return out, total


def most_rows(dtype: torch.dtype) -> int:
    """Rows of a product with a packed weight: float32 has no tensor cores, and more would not fit into registers."""
    return ROWS if dtype is torch.float32 else MOST_ROWS


def _constants(
    dtype: torch.dtype, inputs: int, outputs: int, rows: int, form: tuple[int, int, bool], *, has_gate: bool
) -> dict[str, int | bool]:
    """Sizes of programs, and the form of a weight.

    About 8 KB of 16-bit numbers are read at a time, or as many packed ones, four times in flight. For many rows tiles are larger,
    since every tile reads all of x. The norm takes all of a row if it is short: nothing hides the time that it takes to come.
    """
    if dtype is torch.float32:  # exact products take no tensor cores, and the registers of all threads
        tile, depth = 16, 64
    elif outputs >= MANY_OUTPUTS:
        tile, depth = 64, 128
    else:
        tile, depth = (16, 256) if rows <= 16 else (32, 64)
    bits, groups, has_zeros = form
    norm_depth = 1024
    if bits and has_gate:  # two tiles are unpacked in registers
        tile, depth, norm_depth = 16, min(depth, 16 * bits), 256
    halves = 2 if bits == 4 else 1
    width = triton.next_power_of_2(inputs)
    depth = min(depth, max(16 * halves, width)) // halves
    sizes = {"INPUTS": inputs, "OUTPUTS": outputs, "ROWS": rows, "TILE": tile, "DEPTH": depth}
    return {**sizes, "NORM_DEPTH": min(norm_depth, width), "BITS": bits, "GROUPS": groups, "ZEROS": has_zeros}
