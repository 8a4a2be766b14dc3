"""K and V in 8 bits, as Triton kernels read and write them: whole numbers, and one scale for each token of a head.

`kernels/reference/kv_int8.py` defines them. In a block, all numbers of a head lie together, and behind them the scales of its
tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.reference.kv_int8 import LEAST_SIZE, MOST, SCALE_BYTES

MOST_NUMBER = tl.constexpr(float(MOST))
LEAST = tl.constexpr(LEAST_SIZE)

TO_WHOLE = tl.constexpr(1.5 * 2**23)
"""Added to a number, it rounds it to a whole one (ties to even), which the lowest bits of the sum then are."""

NUMBERS_IN_SCALE = tl.constexpr(SCALE_BYTES)
"""A stride in numbers is one in scales times this."""


def views(cache: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """K or V of a layer, [num_blocks, num_kv_heads, block_size * (head_dim + SCALE_BYTES)] int8, as its two parts.

    Returns:
        Numbers [num_blocks, block_size, num_kv_heads, head_dim], and scales [num_blocks, block_size, num_kv_heads] float32.
    """
    numbers, scales = cache.split((cache.shape[2] - block_size * SCALE_BYTES, block_size * SCALE_BYTES), dim=2)
    return numbers.unflatten(2, (block_size, -1)).transpose(1, 2), scales.view(torch.float32).transpose(1, 2)


def check_scales(numbers: Tensor, scales: Tensor) -> None:
    """Assert that the scales lie where kernels look for them: they follow from the strides of the numbers."""
    block, _, head, _ = numbers.stride()
    expected = block // SCALE_BYTES, 1, head // SCALE_BYTES
    assert all(
        size == 1 or stride == right
        for size, stride, right in zip(scales.shape, scales.stride(), expected, strict=True)
    ), f"scales have strides {scales.stride()}, not {expected}"


@triton.jit
def scale_of(rows):
    """Scales [n] of rows [n, size] float32; of a row that is not finite, NaN."""
    size = tl.maximum(tl.max(tl.abs(rows), axis=1), LEAST)
    return tl.div_rn(size, tl.full(size.shape, MOST_NUMBER, tl.float32)) + tl.sum(rows * 0.0, axis=1)


@triton.jit
def quantized(rows, scale):
    """Rows [n, size] float32 as numbers. Where the scale is NaN, they may be any."""
    shifted = tl.div_rn(rows, tl.broadcast_to(scale[:, None], rows.shape)) + TO_WHOLE
    return shifted.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def dequantized(numbers, scale, dtype: tl.constexpr):
    """Numbers [n, size] and their scales [n] as elements of a dtype."""
    return (numbers.to(tl.float32) * scale[:, None]).to(dtype)
