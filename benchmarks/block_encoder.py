"""Matrices in the block formats of ggml, each number rounded to the nearest that its block can hold; no file is written.

Blocks of 32 are those of ggml's reference (quantize_row_*_ref in https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c),
to the bit. For blocks of 256, llama.cpp searches scales that fit a block better than its extremes do; here extremes are all
there is, so files of llama.cpp lose less.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanoengine.kernels.native.support import unsupported_reason
from nanoengine.kernels.native.weights import dequantized
from nanoengine.kernels.quantized.ggml_blocks import GGMLBlocks
from nanoengine.kernels.quantized.ggml_numbers import SIZES

LARGE = 256
IN_PLACE_OF_LARGE = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What llama.cpp stores a matrix in whose rows are no multiple of 256 (src/llama-quant.cpp)."""

AT_ONCE = 1 << 20
"""Numbers that are encoded at a time."""


def encode(values: Tensor, type: str) -> GGMLBlocks:
    """A matrix [outputs, inputs] of any float dtype in a format of `FORMATS`, or in the one that stands in for it where blocks of
    256 do not fill rows. Inputs are a multiple of 32.
    """
    if type in IN_PLACE_OF_LARGE and values.shape[1] % LARGE:
        type = IN_PLACE_OF_LARGE[type]
    size = SIZES[type][0]
    blocks = values.reshape(-1, size)
    data = torch.cat([FORMATS[type](part.float()) for part in blocks.split(AT_ONCE // size)])
    is_native = unsupported_reason(torch.device("cpu"), torch.float32) is None
    return GGMLBlocks(data.view(len(values), -1), type, dequantized if is_native else None)


def _q4_0(blocks: Tensor) -> Tensor:
    scale, numbers = _around_zero(blocks, 4)
    return torch.cat([_half(scale), _fields(numbers, 16, 4)], 1)


def _q4_1(blocks: Tensor) -> Tensor:
    scale, low, numbers = _above_minimum(blocks, 4)
    return torch.cat([_half(scale), _half(low), _fields(numbers, 16, 4)], 1)


def _q5_0(blocks: Tensor) -> Tensor:
    scale, numbers = _around_zero(blocks, 5)
    return torch.cat([_half(scale), _fields(numbers >> 4, 1, 1), _fields(numbers & 15, 16, 4)], 1)


def _q5_1(blocks: Tensor) -> Tensor:
    scale, low, numbers = _above_minimum(blocks, 5)
    return torch.cat([_half(scale), _half(low), _fields(numbers >> 4, 1, 1), _fields(numbers & 15, 16, 4)], 1)


def _q8_0(blocks: Tensor) -> Tensor:
    scale = blocks.abs().amax(1, keepdim=True) / 127
    scaled = blocks * _inverse(scale)
    numbers = scaled.sign() * (scaled.abs() + 0.5).floor()
    return torch.cat([_half(scale), numbers.to(torch.int8).view(torch.uint8)], 1)


def _q4_k(blocks: Tensor) -> Tensor:
    header, numbers = _scaled_runs(blocks, 4)
    return torch.cat([header, _fields(numbers, 32, 4)], 1)


def _q5_k(blocks: Tensor) -> Tensor:
    header, numbers = _scaled_runs(blocks, 5)
    return torch.cat([header, _fields(numbers >> 4, 32, 1), _fields(numbers & 15, 32, 4)], 1)


def _q6_k(blocks: Tensor) -> Tensor:
    runs = blocks.view(-1, 16, 16)
    scales = _extreme(runs) / -32
    scale = _rounded_to_half(scales.abs().amax(1, keepdim=True) / 127)
    factors = _nearest(scales * _inverse(scale), -127, 127)
    numbers = _nearest(runs * _inverse(scale * factors), -32, 31).add(32).to(torch.uint8).flatten(1)
    signed = factors.flatten(1).to(torch.int8).view(torch.uint8)
    return torch.cat([_fields(numbers & 15, 64, 4), _fields(numbers >> 4, 32, 2), signed, _half(scale[:, 0])], 1)


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0,
    "Q6_K": _q6_k,
    "Q5_K": _q5_k,
    "Q5_1": _q5_1,
    "Q5_0": _q5_0,
    "Q4_K": _q4_k,
    "Q4_1": _q4_1,
    "Q4_0": _q4_0,
}
"""Name of a format -> blocks [n, values] float32 to their bytes [n, bytes] uint8."""


def _around_zero(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """A scale [n, 1] that makes the extreme of a block the lowest number, and the numbers."""
    middle = 1 << bits - 1
    scale = _extreme(blocks) / -middle
    numbers = (blocks.double() * _inverse(scale) + (middle + 0.5)).trunc().clamp(0, 2 * middle - 1)
    return scale, numbers.to(torch.uint8)


def _above_minimum(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    low, most = blocks.amin(1, keepdim=True), (1 << bits) - 1
    scale = (blocks.amax(1, keepdim=True) - low) / most
    numbers = ((blocks - low) * _inverse(scale) + 0.5).trunc().clamp(0, most)
    return scale, low, numbers.to(torch.uint8)


def _scaled_runs(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K: the first 16 bytes (nanoengine/kernels/native/cpp/ggml_blocks.h says what is in them), and numbers."""
    runs, most = blocks.view(-1, 8, 32), (1 << bits) - 1
    low = runs.amin(2, keepdim=True).clamp(max=0)
    scales, minimums = (runs.amax(2, keepdim=True).clamp(min=0) - low) / most, -low
    scale, minimum = (_rounded_to_half(both.amax(1, keepdim=True) / 63) for both in (scales, minimums))
    scales, minimums = _nearest(scales * _inverse(scale), 0, 63), _nearest(minimums * _inverse(minimum), 0, 63)
    numbers = _nearest((runs + minimum * minimums) * _inverse(scale * scales), 0, most)
    (first_scales, other_scales), (first_minimums, other_minimums) = (
        both.flatten(1).to(torch.uint8).split(4, 1) for both in (scales, minimums)
    )
    packed = [
        first_scales | other_scales >> 4 << 6,
        first_minimums | other_minimums >> 4 << 6,
        other_scales & 15 | other_minimums << 4,
    ]
    header = torch.cat([_half(scale[:, 0]), _half(minimum[:, 0]), *packed], 1)
    return header, numbers.to(torch.uint8).flatten(1)


def _extreme(runs: Tensor) -> Tensor:
    """[..., 1]: the number farthest from zero."""
    return runs.gather(-1, runs.abs().argmax(-1, keepdim=True))


def _nearest(values: Tensor, low: int, high: int) -> Tensor:
    return values.round().clamp(low, high)


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale; 0 where that is 0."""
    return torch.where(scales == 0, 0.0, 1 / scales)


def _rounded_to_half(scales: Tensor) -> Tensor:
    return scales.half().float()


def _half(scale: Tensor) -> Tensor:
    """[n, 1] -> [n, 2]: the bytes of a float16."""
    return scale.half().view(torch.uint8)


def _fields(numbers: Tensor, run: int, bits: int) -> Tensor:
    """Runs of numbers into runs of as many bytes: the first in the lowest bits, and so on."""
    parts = numbers.unflatten(1, (-1, 8 // bits, run))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (parts << shifts).sum(2, dtype=torch.uint8).flatten(1)
