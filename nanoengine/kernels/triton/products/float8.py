"""Products of floats of 8 bits (e4m3): weights with a scale for each output, and rows of x with a scale each, made as they come.

The tensor cores of compute capability 8.9 and later multiply them; torch's `_scaled_mm` has them do it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.quantized.tensor import Float8, QuantizedTensor
from nanoengine.kernels.triton.attention.paged_cache import INTERPRETED

LARGEST = tl.constexpr(448.0)
"""The largest number of the format (FP8 Formats for Deep Learning, Micikevicius and others, 2022)."""

MULTIPLE = 16
"""Sizes of matrices that `_scaled_mm` takes are multiples of it."""

SCALED_AT_ONCE = 1024
"""Sums of a row that a program scales."""


def scaled_mm(
    a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """(a_scales * a) @ (b * b_scales) + bias, by torch: [rows, inputs] and [inputs, outputs] float8_e4m3fn, scales [rows, 1] and
    [1, outputs] float32, or both [1, 1]; sums are float32.
    """
    return torch._scaled_mm(a, b, a_scales, b_scales, bias=bias, out_dtype=out_dtype)


@dataclass(frozen=True)
class Float8Rows:
    """Rows of a `Float8` on a device, of which any may still be unset.

    Attributes:
        numbers: [outputs, inputs] float8_e4m3fn.
        scales: [outputs, 1] float32.
        one: [1, 1] float32, which scales nothing; made once, where no CUDA graph is captured.
    """

    numbers: Tensor
    scales: Tensor
    one: Tensor

    @classmethod
    def like(cls, source: Float8, outputs: int, device: torch.device) -> Float8Rows:
        """Storage for so many rows, of zeros."""
        numbers = torch.zeros(outputs, source.shape[1], dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        scales = torch.zeros(outputs, 1, dtype=torch.float32, device=device)
        return cls(numbers, scales, torch.ones(1, 1, dtype=torch.float32, device=device))

    def take_rows(self, first: int, source: QuantizedTensor) -> bool:
        """Store rows from `first` on, unless they are of another format: then nothing changes."""
        if not isinstance(source, Float8):
            return False
        rows = slice(first, first + source.shape[0])
        self.numbers.view(torch.uint8)[rows].copy_(source.numbers.view(torch.uint8))
        self.scales[rows].copy_(source.scales)
        return True

    def dequantize(self, dtype: torch.dtype, chosen: Tensor | None = None) -> Tensor:
        """Its numbers, or those of the chosen rows ([n] int64), computed in float32 and rounded once."""
        weight = Float8(self.numbers, self.scales)
        return (weight if chosen is None else weight[chosen]).dequantize(dtype)

    def product(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """x W^T + bias, where x is rounded row by row: [rows, inputs] -> [rows, outputs]."""
        if not len(x):
            return x.new_empty(0, len(self.numbers), dtype=out_dtype)
        rows, scales = quantize_rows(x)
        if out_dtype is torch.bfloat16:
            return scaled_mm(rows, self.numbers.T, scales, self.scales.T, bias, out_dtype)
        # Scales by rows make bfloat16 alone with all versions of CUDA that torch is built for.
        sums = scaled_mm(rows, self.numbers.T, self.one, self.one, None, torch.float32)
        return scale_sums(sums, scales, self.scales, bias, out_dtype)


def can_multiply(source: Float8, outputs: int) -> bool:
    """Whether `_scaled_mm` takes a weight of so many outputs."""
    return outputs % MULTIPLE == 0 and source.shape[1] % MULTIPLE == 0


@triton.jit
def _to_nearest(values):
    """The nearest numbers of the format, ties to even: 3 bits behind the first, or below 2^-6 multiples of 2^-9."""
    bits = values.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFFF + (bits >> 20 & 1) & -0x100000).to(tl.float32, bitcast=True)
    multiples = (values + 24576.0) - 24576.0  # neighbours of 1.5 * 2^14 are 2^-9 apart
    return tl.where(tl.abs(values) < 0.015625, multiples, nearest)


@triton.jit
def _quantize_kernel(x, numbers, scales, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Row i. One with a number that is not finite has the scale NaN, so that nothing that comes of it is finite."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    values = tl.load(x + row * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    highest = tl.max(tl.where(values == values, tl.abs(values), float("inf")))
    scale = tl.where(highest == float("inf"), float("nan"), tl.where(highest == 0.0, 1.0, highest / LARGEST))
    tl.store(scales + row, scale)
    values = values / scale
    if INTERPRETED:  # Triton's interpreter would make 64 of 127
        values = _to_nearest(values)
    tl.store(numbers + row * SIZE + column, values.to(numbers.dtype.element_ty), mask=mask)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as numbers of 8 bits and a scale for each row: its largest number becomes the largest of the format.

    Args:
        x: [rows, size].

    Returns:
        [rows, size] float8_e4m3fn and [rows, 1] float32: x is about their product.
    """
    rows, size = x.shape
    numbers = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        block, warps = _sizes(size)
        _quantize_kernel[(rows,)](x.contiguous(), numbers, scales, SIZE=size, BLOCK=block, num_warps=warps)
    return numbers, scales


@triton.jit
def _scale_kernel(sums, of_rows, of_columns, bias, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    """Program (i, j): columns [j * BLOCK, (j + 1) * BLOCK) of row i."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    values = tl.load(sums + row * SIZE + column, mask=mask) * tl.load(of_rows + row)
    values *= tl.load(of_columns + column, mask=mask)
    if BIAS:
        values += tl.load(bias + column, mask=mask).to(tl.float32)
    tl.store(out + row * SIZE + column, values.to(out.dtype.element_ty), mask=mask)


def scale_sums(
    sums: Tensor, of_rows: Tensor, of_columns: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """sums * scales of their rows * scales of their columns + bias; over the sums, if the result is float32.

    Args:
        sums: [rows, size] float32; logits of many rows are so large that each pass over them counts.
        of_rows, of_columns: [rows, 1] and [size, 1] float32.
        bias: [size].
    """
    rows, size = sums.shape
    out = sums if out_dtype is torch.float32 else torch.empty_like(sums, dtype=out_dtype)
    _scale_kernel[(rows, triton.cdiv(size, SCALED_AT_ONCE))](
        *(sums, of_rows, of_columns, bias, out), SIZE=size, BLOCK=SCALED_AT_ONCE, BIAS=bias is not None
    )
    return out


def _sizes(size: int) -> tuple[int, int]:
    """Columns of a program, and its warps: 8 to 16 values for each thread."""
    block = triton.next_power_of_2(size)
    return block, min(16, max(1, block // 512))
