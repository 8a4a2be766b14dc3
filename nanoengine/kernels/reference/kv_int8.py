"""K and V in 8 bits: whole numbers, and one scale for each token of a head. What the definition says, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = torch.float32.itemsize

MOST = 127
"""The largest number; the smallest is its negative, so that 0 stays 0 and signs are alike."""

LEAST_SIZE = 1e-30
"""Smaller elements than a fraction of this become 0: their scale would leave the range in which float32 is precise."""


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [..., head_dim] int8 and scales [...] float32 of rows [..., head_dim] of any dtype.

    Numbers are rounded to the nearest, ties to even. A row that is not finite has NaN for a scale, and so is read as NaN.
    """
    rows = rows.float()
    sizes = rows.abs().amax(-1)
    scales = torch.where(sizes.isfinite(), sizes.clamp(min=LEAST_SIZE) / MOST, torch.nan)
    return (rows / scales[..., None]).round().nan_to_num(0.0).to(torch.int8), scales


def dequantize(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [..., head_dim]: each number times its scale, rounded to a dtype."""
    return (numbers.float() * scales[..., None]).to(dtype)
