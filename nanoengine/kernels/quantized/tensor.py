"""QuantizedTensor: a matrix of integers and scales, from a file or a quantizer, before kernels pack it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor


class QuantizedTensor(Protocol):
    """A quantized matrix [outputs, inputs]."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def format(self) -> str:
        """The name of its format, for messages."""
        ...

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The numbers [outputs, inputs]: computed in float32, rounded once."""
        ...

    def __getitem__(self, rows: Tensor | slice) -> Self:
        """Some rows, by [n] int64 indices, or by a slice, which is a view."""
        ...


@runtime_checkable
class QuantizedExperts(Protocol):
    """The matrices of all experts, in a tensor of shape [experts, inputs, outputs]."""

    def expert(self, number: int) -> QuantizedTensor:
        """The matrix of an expert: [outputs, inputs]."""
        ...

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """All numbers: [experts, inputs, outputs]."""
        ...


@dataclass(frozen=True)
class Grouped:
    """A matrix of integers with a scale for each group of inputs: w[o, i] = scales[o, g] * (numbers[o, i] - zeros[o, g]), g =
    i // group.

    The group is inputs / scales.shape[1].

    Attributes:
        numbers: [outputs, inputs] uint8, below 2 ** bits.
        scales: [outputs, groups] float16, bfloat16 or float32.
        zeros: [outputs, groups] uint8; None: 2 ** (bits - 1) everywhere.
        bits: 4 or 8.
    """

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def group(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    @property
    def format(self) -> str:
        return f"int{self.bits}" if self.scales.shape[1] == 1 else f"int{self.bits}-{self.group}"

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        grouped = self.numbers.unflatten(1, (-1, self.group)).float()
        zeros = 1 << self.bits - 1 if self.zeros is None else self.zeros[:, :, None].float()
        return ((grouped - zeros) * self.scales[:, :, None].float()).flatten(1).to(dtype)

    def __getitem__(self, rows: Tensor | slice) -> Grouped:
        zeros = None if self.zeros is None else self.zeros[rows]
        return Grouped(self.numbers[rows], self.scales[rows], zeros, self.bits)


@dataclass(frozen=True)
class Float8:
    """A matrix of 8-bit floats with a scale for each output: w[o, i] = scales[o] * numbers[o, i].

    Attributes:
        numbers: [outputs, inputs] float8_e4m3fn.
        scales: [outputs, 1] float32; of a scale per tensor, all are the same.
    """

    numbers: Tensor
    scales: Tensor

    format = "fp8"

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self.numbers.float() * self.scales).to(dtype)

    def __getitem__(self, rows: Tensor | slice) -> Float8:
        # As bytes: not all devices gather floats of 8 bits.
        numbers = self.numbers.view(torch.uint8)[rows].view(self.numbers.dtype)
        return Float8(numbers, self.scales[rows])
