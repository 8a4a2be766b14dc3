"""Quantization at load: quantizers of dense matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from nanoengine.errors import InvalidConfig, InvalidWeights
from nanoengine.kernels.quantized.tensor import Float8, Grouped, QuantizedTensor

LARGEST_FLOAT8 = 448.0
"""The largest number of float8_e4m3fn."""

GROUPS = 32
"""Inputs of a group of "int4", and of "int4-128" where 128 does not divide a row."""

RANGES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Candidates for the clipped range of a group, as parts of its full range."""

BITS = {"int8": 8.0, "int4": 4 + 24 / 32, "int4-128": 4 + 24 / 128, "fp8": 8.0}
"""Bits of a number in each format, scales and zero points included."""

SMALLEST_SCALE = 1e-36
"""The smallest scale with a finite inverse."""

AT_ONCE = 1 << 18
"""Numbers that are quantized at a time: temporaries fit in the cache."""


def quantizer(name: str, float8_unsupported_reason: str | None = None) -> Callable[[Tensor], QuantizedTensor]:
    """The quantizer of a value of the option `quantization`.

    Each takes [outputs, inputs] of any float dtype. "int8" and "fp8" have a scale for each output, "int4" and "int4-128" a scale
    and a zero for each group of 32 or 128 inputs. A row that 128 does not divide has groups of 32, and one that 32 does not
    divide becomes int8.

    Args:
        name: one of `options.QUANTIZATIONS`.
        float8_unsupported_reason: the reason that nothing here multiplies floats of 8 bits, if there is one.

    Raises:
        InvalidConfig: "fp8" without support for it. A quantizer itself raises InvalidWeights if a number is not
            finite, or too large for a scale in float16.
    """
    known: dict[str, Callable[[Tensor], QuantizedTensor]] = {
        "int8": _int8,
        "int4": partial(_int4, group=GROUPS),
        "int4-128": partial(_int4, group=128),
        "fp8": _fp8,
    }
    if name == "fp8" and float8_unsupported_reason is not None:
        raise InvalidConfig(
            f"quantization is 'fp8', but it cannot run here: {float8_unsupported_reason}; "
            "choose 'int8', which has the same size, or None"
        )
    return known[name]


def _int8(values: Tensor) -> Grouped:
    return Grouped(*_scaled(values, "int8", 127, torch.uint8, lambda scaled: scaled.round_().add_(128)), None, 8)


def _fp8(values: Tensor) -> Float8:
    return Float8(*_scaled(values, "fp8", LARGEST_FLOAT8, torch.float8_e4m3fn, lambda scaled: scaled))


def _scaled(
    values: Tensor, name: str, largest: float, dtype: torch.dtype, rounded: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Numbers from -`largest` to `largest`, rounded to `dtype`, and a scale [outputs, 1] for each output."""
    numbers = torch.empty(values.shape, dtype=dtype, device=values.device)
    scales = torch.empty(len(values), 1, dtype=torch.float32, device=values.device)
    for rows in _pieces(values):
        part = _finite(values[rows], name)
        scales[rows] = part.abs().amax(1, keepdim=True) / largest
        numbers[rows] = rounded((part * _inverse(scales[rows])).clamp_(-largest, largest)).to(dtype)
    return numbers, scales


def _int4(values: Tensor, group: int) -> Grouped:
    outputs, inputs = values.shape
    if inputs % group:
        return _int8(values) if inputs % GROUPS else _int4(values, GROUPS)
    numbers = torch.empty(outputs, inputs, dtype=torch.uint8, device=values.device)
    scales = torch.empty(outputs, inputs // group, dtype=torch.float16, device=values.device)
    zeros = torch.empty(scales.shape, dtype=torch.uint8, device=values.device)
    for rows in _pieces(values):
        grouped = _finite(values[rows], "int4").unflatten(1, (-1, group))
        scale, zero = _best_ranges(grouped)
        numbers[rows] = _rounded(grouped, scale, zero).flatten(1)
        scales[rows], zeros[rows] = scale.squeeze(2), zero.squeeze(2)
    return Grouped(numbers, scales, zeros, 4)


def _best_ranges(grouped: Tensor) -> tuple[Tensor, Tensor]:
    """The scale (exact in float16) and the zero of each group [rows, groups, size] whose squared errors are the least."""
    low, high = grouped.amin(2, keepdim=True).clamp_(max=0), grouped.amax(2, keepdim=True).clamp_(min=0)
    candidates = []
    for part in RANGES:
        scale = ((high - low) * (part / 15)).half().float()
        if not scale.isfinite().all():
            raise InvalidWeights(
                f"a weight has numbers of up to {max(-float(low.min()), float(high.max())):.3g}, and scales of int4 are float16: "
                'choose quantization="int8", or None'
            )
        zero = (low * -part * _inverse(scale)).round_()
        error = _rounded(grouped, scale, zero).sub_(zero).mul_(scale).sub_(grouped).square_().sum(2, keepdim=True)
        candidates.append((error, scale, zero))
    (error, scale, zero), *others = candidates
    for other, other_scale, other_zero in others:
        is_better = other < error
        error = torch.where(is_better, other, error)
        scale, zero = torch.where(is_better, other_scale, scale), torch.where(is_better, other_zero, zero)
    return scale, zero


def _rounded(grouped: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (grouped * _inverse(scale)).add_(zero).round_().clamp_(0, 15)


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale; 0 for scales near 0, whose numbers are all near 0."""
    return torch.where(scales < SMALLEST_SCALE, 0.0, 1 / scales)


def _finite(values: Tensor, format: str) -> Tensor:
    """In float32.

    Raises:
        InvalidWeights: a number is not finite.
    """
    values = values.float()
    # The sum is nearly always finite, and cheaper.
    if not values.sum().isfinite() and not values.isfinite().all():
        raise InvalidWeights(
            f"a weight that is to become {format} has numbers that are not finite: no scale holds them. Choose quantization=None "
            "to load it as it is, or repair the checkpoint"
        )
    return values


def _pieces(values: Tensor) -> Iterable[slice]:
    """Rows that are quantized at a time."""
    step = max(1, AT_ONCE // values.shape[1])
    return (slice(first, first + step) for first in range(0, len(values), step))
