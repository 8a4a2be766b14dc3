"""NVFP4: a matrix of 4-bit floats with 8-bit scales and a float32 factor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 16

E2M1_CODEBOOK = torch.tensor(
    [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32, device="cpu"
)
"""Twice the floats of 2 bits of exponent and 1 of mantissa."""

E4M3 = torch.arange(128, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float().nan_to_num(480.0)
"""Floats of 4 bits of exponent and 3 of mantissa, without a sign and without NaN."""


@dataclass(frozen=True)
class NVFP4:
    """w[o, i] = factors[o] * scale[o, i // 16] * number[o, i].

    Attributes:
        numbers: [outputs, inputs] uint8, below 16: floats of 2 bits of exponent and 1 of mantissa.
        scales: [outputs, inputs / 16] uint8, below 128: floats of 4 bits of exponent and 3 of mantissa, without a sign.
        factors: [outputs, 1] float32; of a scale per tensor, all are the same.
    """

    numbers: Tensor
    scales: Tensor
    factors: Tensor

    format = "NVFP4"

    @classmethod
    def of_blocks(cls, data: Tensor, shape: torch.Size, factor: float = 1.0) -> NVFP4:
        """A matrix of blocks of ggml and their factor. A block has four scales, whose signs have no effect, then the numbers of
        four groups, two in a byte: the first eight of a group in the lower halves.
        """
        scales, packed = data.reshape(-1, 36).split((4, 32), 1)
        scales = torch.where(scales == 0x7F, 0, scales & 0x7F)
        packed = packed.unflatten(1, (-1, GROUP // 2))
        numbers = torch.stack((packed & 15, packed >> 4), 2)
        factors = torch.full((shape[0], 1), factor, dtype=torch.float32, device="cpu")
        return cls(numbers.view(shape), scales.view(shape[0], -1), factors)

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        scales = self.factors * 0.5 * E4M3[self.scales.int()]  # the codebook has twice the numbers
        grouped = E2M1_CODEBOOK[self.numbers.int()].unflatten(1, (-1, GROUP))
        return (scales[:, :, None] * grouped).flatten(1).to(dtype)

    def __getitem__(self, rows: Tensor | slice) -> NVFP4:
        return NVFP4(self.numbers[rows], self.scales[rows], self.factors[rows])
