"""Matrices in every format that native kernels multiply with as it is, and what their products are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.kernels.native.weights import BLOCKS as KEPT
from nanoengine.kernels.operations import ExpertWeights, Kernels, Weight
from nanoengine.kernels.quantized.ggml_blocks import GGMLBlocks
from nanoengine.kernels.quantized.ggml_numbers import SIZES
from nanoengine.kernels.quantized.tensor import Grouped, QuantizedTensor
from tests.kernels.formulas import SMALLEST

BLOCK = 16
"""Activations that are rounded together."""

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "MXFP4": ()}
HALVES |= {"NVFP4": (), "Q2_K": (80, 82), "IQ1_M": (), "TQ1_0": (52,), "TQ2_0": (64,)}
"""Where the float16 are in a block, if not one in its first two bytes."""

ROUNDED = 4e-6
"""Error of a rounded product: of its sum in float32, relative to what the largest number of the output would have made of it."""


@dataclass(frozen=True)
class Format:
    """One that `drawn` can draw; a group of 0 is a whole row."""

    name: str
    bits: int = 0
    group: int = 0
    zeros: bool = False
    scales: torch.dtype = torch.float16

    @property
    def unit(self) -> int:
        """Inputs are a multiple of it."""
        return SIZES[self.name][0] if self.name in KEPT else self.group or 1

    def __str__(self) -> str:
        return self.name


def _grouped(bits: int, group: int, zeros: bool, scales: torch.dtype) -> Format:
    size = f"groups of {group}" if group else "rows"
    name = f"int{bits}, {size}, {str(scales).removeprefix('torch.')}{', zeros' if zeros else ''}"
    return Format(name, bits, group, zeros, scales)


SCALES = (torch.float16, torch.bfloat16, torch.float32)
BLOCKS = [Format(name) for name in KEPT]
GROUPS = [_grouped(4, group, zeros, dtype) for group in (32, 64, 128) for zeros in (False, True) for dtype in SCALES]
GROUPS += [_grouped(8, 0, False, dtype) for dtype in SCALES]
GROUPS += [_grouped(8, group, zeros, torch.float16) for group in (32, 128) for zeros in (False, True)]
GROUPS += [_grouped(4, 0, True, torch.float16), _grouped(8, 0, True, torch.float32)]
FORMATS = [*BLOCKS, *GROUPS]
DIFFERENT = [*BLOCKS, GROUPS[0], GROUPS[4], GROUPS[17], GROUPS[18], GROUPS[22]]
"""One of each way in which kernels read them."""


def drawn(form: Format, outputs: int, inputs: int, seed: int = 0) -> QuantizedTensor:
    """Any numbers, with scales that make them of about the same size in every format."""
    generator = torch.Generator().manual_seed(seed)

    def bytes_below(end: int, *shape: int) -> Tensor:
        return torch.randint(0, end, shape, dtype=torch.uint8, generator=generator)

    def sizes(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) + 0.1

    if form.bits:
        shape = outputs, inputs // form.group if form.group else 1
        zeros = bytes_below(1 << form.bits, *shape) if form.zeros else None
        scales = (sizes(*shape) / (1 << form.bits)).to(form.scales)
        return Grouped(bytes_below(1 << form.bits, outputs, inputs), scales, zeros, form.bits)
    values, nbytes = SIZES[form.name]
    data = bytes_below(256, outputs, inputs // values, nbytes)
    factors = {"Q8_0": 256, "Q4_K": 1024, "Q5_K": 2048, "Q6_K": 4096, "Q3_K": 128, "IQ4_NL": 256, "IQ4_XS": 4096}
    factors |= {"IQ3_S": 512, "IQ3_XXS": 1024, "IQ2_S": 256, "IQ2_XS": 256, "IQ2_XXS": 256}
    for at in HALVES.get(form.name, (0,)):
        data[:, :, at : at + 2] = (
            (sizes(outputs, inputs // values, 1) / factors.get(form.name, 16)).half().view(torch.uint8)
        )
    if form.name == "MXFP4":
        data[:, :, 0] = 120 + bytes_below(6, outputs, inputs // values)
    if form.name == "NVFP4":
        data[:, :, :4] = 24 + bytes_below(24, outputs, inputs // values, 4)
    return GGMLBlocks(data.flatten(1), form.name)


def at_its_ends(form: Format, outputs: int, inputs: int, *, high: bool) -> QuantizedTensor:
    """Every number is the lowest or the highest of its bits; scales are 1, or as large as whole numbers of theirs can be."""
    if form.bits:
        most = (1 << form.bits) - 1
        scales = torch.ones(outputs, inputs // form.group if form.group else 1, dtype=form.scales)
        zeros = torch.full(scales.shape, most * (not high), dtype=torch.uint8) if form.zeros else None
        return Grouped(torch.full((outputs, inputs), most * high, dtype=torch.uint8), scales, zeros, form.bits)
    values, nbytes = SIZES[form.name]
    lowest, highest = (0x80, 0x7F) if form.name == "Q8_0" else (0, 0xFF)
    data = torch.full((outputs, inputs // values, nbytes), highest if high else lowest, dtype=torch.uint8)
    for at in HALVES.get(form.name, (0,)):
        data[:, :, at : at + 2] = torch.ones(1).half().view(torch.uint8)
    if form.name in ("Q4_K", "Q5_K"):
        data[:, :, 4:16] = 0xFF
    if form.name == "Q6_K":
        data[:, :, 192:208] = 0x80  # -128
    if form.name == "MXFP4":
        data[:, :, 0] = 128
    if form.name == "NVFP4":
        data[:, :, :4] = 0x7E
    return GGMLBlocks(data.flatten(1), form.name)


def weight_from(kernels: Kernels, *parts: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Weight:
    """A weight of these parts, one below the other, the last one first; still quantized."""
    outputs = sum(len_of(part) for part in parts)
    weight = kernels.new_weight(outputs, parts[0].shape[1], dtype, torch.device("cpu"))
    first = outputs
    for part in reversed(parts):
        first -= len_of(part)
        weight.rows(first, len_of(part)).copy_quantized(part)
    return weight


def experts_from(kernels: Kernels, values: Sequence[QuantizedTensor], dtype: torch.dtype) -> ExpertWeights:
    """The matrices of experts, one for each."""
    weights = kernels.new_experts(len(values), *values[0].shape, dtype, torch.device("cpu"))
    for i, value in enumerate(values):
        weights.expert(i).copy_quantized(value)
    return weights


def len_of(source: QuantizedTensor) -> int:
    return source.shape[0]


def rounded(x: Tensor, parts: int = 1) -> Tensor:
    """Activations as kernels round them, in float64: blocks of 16 in 255 steps, the largest of a block being 127 of them.

    A second part rounds what the first one leaves, to steps that are 254 times smaller.
    """
    blocks = F.pad(x.float(), (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    high = blocks.abs().amax(2, keepdim=True)
    inverse = torch.where(high > 0, torch.full_like(high, 127) / high, 0)  # torch divides numbers otherwise
    numbers = (blocks * inverse).double()
    assert numbers.abs().max() < 127.01
    found = numbers.round()
    if parts == 2:
        found += ((numbers - found) * 254).round() / 254
    return (found * (high / 127).double()).flatten(1)[:, : x.shape[1]]


def assert_rounded(result: Tensor, x: Tensor, source: QuantizedTensor, parts: int = 1) -> None:
    """float32 results are products of rounded activations."""
    weight = source.dequantize(torch.float32).double()
    values = 2 * weight.abs().amax(1)  # what numbers may be without their minimums and zeros
    if isinstance(source, Grouped):
        values = source.scales.double().amax(1) * (1 << source.bits)
    factors = rounded(x, parts)
    allowed = ROUNDED * factors.abs().sum(1, keepdim=True) * values + SMALLEST
    error = ((result.double() - factors @ weight.T).abs() / allowed).nan_to_num(torch.inf).max().item()
    assert error <= 1, f"{error:.3} times the error that is allowed"


def assert_numbers(found: Tensor, form: Format, source: QuantizedTensor) -> None:
    """To the bit; where a scale times a number below the zero rounds by itself, up to those roundings."""
    numbers = source.dequantize(torch.float32)
    if form.zeros and form.scales is torch.float32:
        assert isinstance(source, Grouped)
        allowed = (
            source.scales.abs().amax() * (1 << form.bits) * (2.0**-22 if found.dtype is torch.float32 else 2.0**-8)
        )
        assert ((found.double() - numbers.double()).abs() <= allowed).all()
    else:
        assert torch.equal(found, numbers.to(found.dtype))
