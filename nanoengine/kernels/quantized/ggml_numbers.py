"""The block formats of ggml, back into numbers: a small function for each.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. All results are those of the float32 arithmetic that the
formats are defined by, to the bit: the products are exact (or the only thing that rounds), so that one operation rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanoengine.errors import UnsupportedModel
from nanoengine.kernels.quantized.ggml_formats import FORMATS

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that store numbers as they are."""

IQ4_CODEBOOK = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32, device="cpu"
)
E2M1_CODEBOOK = torch.tensor(
    [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32, device="cpu"
)
"""What numbers of 4 bits stand for: in the IQ4 formats, and as floats of 2 bits of exponent and 1 of mantissa, twice as large."""

E4M3 = torch.cat(
    (
        torch.arange(127, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float(),
        torch.tensor([480.0], dtype=torch.float32, device="cpu"),
    )
)
"""Floats of 4 bits of exponent and 3 of mantissa, without a sign and without NaN."""

PIECE = 1 << 15
"""Numbers that torch makes at a time: what is in between stays in the second-level cache. From the next number on torch would
share out every one of the small operations among its threads, which then wait for each other more than they work."""

PIECE_OF_PACKAGE = 1 << 17
"""The same where the package `gguf` makes them, in one thread, and a call costs more."""


def dequantize(data: Tensor, type: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """The numbers of a tensor.

    Args:
        data: [bytes] uint8, as in the file.
        type: the name of its format; one of `formats.FORMATS`.
        shape: of the result; rows are multiples of the format's block.
        dtype: of the result; None is what the format is by itself: F16 and BF16 as stored, float32 of all others. Numbers are
            rounded once.

    Returns:
        A new tensor, or where nothing is to be converted a view of `data`.
    """
    if type in FLOATS:
        whole = data if data.data_ptr() % FLOATS[type].itemsize == 0 else data.clone()
        return whole.view(FLOATS[type]).view(*shape).to(dtype or FLOATS[type])
    values, nbytes = SIZES[type]
    blocks = data.view(-1, nbytes)
    out = torch.empty(math.prod(shape) // values, values, dtype=dtype or torch.float32, device="cpu")
    count = (PIECE_OF_PACKAGE if type in BY_PACKAGE else PIECE) // values
    for part, result in zip(blocks.split(count), out.split(count), strict=True):
        result.copy_(FUNCTIONS[type](part))
    return out.view(*shape)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:], 16).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:], 16) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    fifth = _bits(blocks[:, 2:6]) << 4
    return _half(blocks, 0) * ((_nibbles(blocks[:, 6:], 16) | fifth).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    fifth = _bits(blocks[:, 4:8]) << 4
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:], 16) | fifth) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8)


def _q2_k(blocks: Tensor) -> Tensor:
    """Sixteen runs of 16 numbers, each with a scale and a minimum of 4 bits."""
    numbers = _fields(blocks[:, 16:80], 32, bits=2).view(-1, 16, 16)
    scale, minimum = _half(blocks, 80) * (blocks[:, :16] & 15), _half(blocks, 82) * (blocks[:, :16] >> 4)
    return (scale[:, :, None] * numbers - minimum[:, :, None]).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    """Sixteen runs of 16 numbers, each with a scale of 6 bits: lower halves of eight bytes, upper ones, then two bits of four."""
    third = _fields(blocks[:, :32], 32, bits=1) << 2
    numbers = (_fields(blocks[:, 32:96], 32, bits=2) | third).float() - 4
    factors = (_nibbles(blocks[:, 96:104], 8) | _fields(blocks[:, 104:108], 4, bits=2) << 4).float() - 32
    scales = _half(blocks, 108) * factors
    return (scales[:, :, None] * numbers.view(-1, 16, 16)).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _scaled_runs(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Tensor) -> Tensor:
    fifth = _fields(blocks[:, 16:48], 32, bits=1) << 4
    return _scaled_runs(blocks, _nibbles(blocks[:, 48:], 32) | fifth)


def _q6_k(blocks: Tensor) -> Tensor:
    upper = _fields(blocks[:, 128:192], 32, bits=2) << 4
    numbers = (_nibbles(blocks[:, :128], 64) | upper).float() - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return (scales[:, :, None] * numbers.view(-1, 16, 16)).flatten(1)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * IQ4_CODEBOOK[_nibbles(blocks[:, 2:], 16).int()]


def _iq4_xs(blocks: Tensor) -> Tensor:
    """Eight runs of 32 numbers, each with a scale of 6 bits, whose upper two are apart."""
    factors = (_fields(blocks[:, 4:8], 1, bits=4) | _fields(blocks[:, 2:4], 1, bits=2) << 4).float() - 32
    scales = _half(blocks, 0) * factors
    return (scales[:, :, None] * IQ4_CODEBOOK[_nibbles(blocks[:, 8:], 16).int()].view(-1, 8, 32)).flatten(1)


def _mxfp4(blocks: Tensor) -> Tensor:
    """The scale is a power of two: its exponent, from 2^-128, as the numbers of the codebook are twice as large."""
    exponent = blocks[:, :1].int()
    scale = torch.where(exponent < 2, 0x200000 << exponent, (exponent - 1) << 23).view(torch.float32)
    return scale * E2M1_CODEBOOK[_nibbles(blocks[:, 1:], 16).int()]


def nvfp4_parts(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of four runs of 16 numbers, places in the codebook [n, 64] and in `E4M3` [n, 4]; signs of scales count for nothing."""
    scales = blocks[:, :4]
    return _nibbles(blocks[:, 4:], 8), torch.where(scales == 0x7F, 0, scales & 0x7F)


def _nvfp4(blocks: Tensor) -> Tensor:
    numbers, scales = nvfp4_parts(blocks)
    return (0.5 * E4M3[scales.int()][:, :, None] * E2M1_CODEBOOK[numbers.int()].view(-1, 4, 16)).flatten(1)


def _by_package(kind: str) -> Callable[[Tensor], Tensor]:
    """What the package of llama.cpp's authors makes of them: these need large tables.

    Raises:
        UnsupportedModel: it is not installed.
    """

    def function(blocks: Tensor) -> Tensor:
        try:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize
        except ImportError as error:
            raise UnsupportedModel(f"weights of type {kind} are read by the package gguf: pip install gguf") from error
        row = blocks.numpy().reshape(1, -1)  # the package loops over every 16 rows
        return torch.from_numpy(dequantize(row, GGMLQuantizationType[kind])).view(len(blocks), -1)

    return function


BY_PACKAGE = ("IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "TQ1_0", "TQ2_0")

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
} | {kind: _by_package(kind) for kind in BY_PACKAGE}
"""Name of a format -> blocks [n, bytes] uint8 to their values [n, values] float32."""

SIZES = {known.name: (known.values, known.nbytes) for known in FORMATS.values()}


def _half(blocks: Tensor, at: int) -> Tensor:
    """[n, 1]: the float16 at this byte of each block."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(packed: Tensor, run: int, bits: int) -> Tensor:
    """Runs of bytes hold so many runs of numbers of `bits` bits: in the lowest bits all of the first, and so on."""
    packed = packed.unflatten(1, (-1, run))
    mask = (1 << bits) - 1
    return torch.stack([packed >> shift & mask for shift in range(0, 8, bits)], 2).flatten(1)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    return _fields(packed, run, bits=4)


def _bits(packed: Tensor) -> Tensor:
    """All bits of the first byte, the lowest first, then those of the next."""
    return _fields(packed, 1, bits=1)


def _scaled_runs(blocks: Tensor, numbers: Tensor) -> Tensor:
    """Q4_K and Q5_K: 8 runs of 32 numbers, each with a scale and a minimum of 6 bits, and both with a float16 for the block.

    Twelve bytes hold the 16 of them: four the lower six bits of the first four scales, four those of the first four minimums; in
    the last four are the lower halves of the other four scales and minimums, whose upper two bits top the first eight bytes.
    """
    scales, minimums, rest = blocks[:, 4:16].split(4, 1)
    scales = torch.cat([scales & 63, rest & 15 | scales >> 2 & 48], 1)
    minimums = torch.cat([minimums & 63, rest >> 4 | minimums >> 2 & 48], 1)
    scale, minimum = _half(blocks, 0) * scales, _half(blocks, 2) * minimums
    return (scale[:, :, None] * numbers.view(-1, 8, 32) - minimum[:, :, None]).flatten(1)
