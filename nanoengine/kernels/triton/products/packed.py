"""Weights of whole numbers as kernels read them: how they lie in memory, and how a tile of them becomes numbers again.

Of 4 bits, a block of 16 bytes holds 32 neighbouring inputs: byte i has input i in its low half and input 16 + i in its high one.
So both halves of a tile of bytes have the same scales, and none has to be interleaved with another: a product adds up one after
the other, each with other columns of x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.quantized.tensor import Grouped, QuantizedTensor
from nanoengine.kernels.triton.attention.paged_cache import INTERPRETED

BLOCK = 32
"""Inputs that lie in one block of bytes, if they have 4 bits."""

NUMBERS = (0, 1, False)
"""Stands for the form of packed numbers where there are none."""

TILE, DEPTH = 4, 512
"""Outputs and bytes of each that a program dequantizes."""

NUM_WARPS = 4

RAISED = tl.constexpr(0x4B000000)
"""The bits of the float 2^23: what stands in the lowest of them, a whole number, is added to it."""


@dataclass(frozen=True)
class PackedWeight:
    """Rows of a `Grouped`, of which any may still be unset.

    Attributes:
        numbers: [outputs, inputs] uint8, or half as many bytes if they have 4 bits.
        scales: [outputs, groups] float16, bfloat16 or float32.
        zeros: [outputs, groups] uint8; None: 2 ** (bits - 1) everywhere.
        bits: 4 or 8.
    """

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int

    @classmethod
    def like(cls, source: Grouped, outputs: int, device: torch.device) -> PackedWeight:
        """Storage for so many rows of the same format, of zeros."""
        width, groups = source.shape[1] * source.bits // 8, source.scales.shape[1]
        numbers = torch.zeros(outputs, width, dtype=torch.uint8, device=device)
        scales = torch.zeros(outputs, groups, dtype=source.scales.dtype, device=device)
        zeros = None if source.zeros is None else torch.zeros(outputs, groups, dtype=torch.uint8, device=device)
        return cls(numbers, scales, zeros, source.bits)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.numbers.shape[0], self.numbers.shape[1] * 8 // self.bits))

    @property
    def form(self) -> tuple[int, int, bool]:
        """Its bits, its groups, and whether there are zeros."""
        return self.bits, self.scales.shape[1], self.zeros is not None

    def take_rows(self, first: int, source: QuantizedTensor) -> bool:
        """Store rows from `first` on, unless they are of another format: then nothing changes."""
        if not isinstance(source, Grouped) or source.scales.dtype != self.scales.dtype:
            return False
        if (source.bits, source.scales.shape[1], source.zeros is not None) != self.form:
            return False
        rows = slice(first, first + source.shape[0])
        numbers = source.numbers.to(self.numbers.device)
        if self.bits == 4:
            low, high = numbers.unflatten(1, (-1, 2, BLOCK // 2)).unbind(2)
            numbers = (low | high << 4).flatten(1)
        self.numbers[rows].copy_(numbers)
        self.scales[rows].copy_(source.scales)
        if self.zeros is not None and source.zeros is not None:
            self.zeros[rows].copy_(source.zeros)
        return True

    def dequantize(self, dtype: torch.dtype, chosen: Tensor | None = None) -> Tensor:
        """Its numbers, or those of the chosen rows ([n] int64), computed in float32 and rounded once: [n, inputs]."""
        outputs, inputs = self.shape
        num_rows, width = outputs if chosen is None else len(chosen), self.numbers.shape[1]
        out = torch.empty(num_rows, inputs, dtype=dtype, device=self.numbers.device)
        if num_rows:
            _dequantize_kernel[(triton.cdiv(num_rows, TILE), triton.cdiv(width, DEPTH))](
                self.numbers,
                self.scales,
                self.zeros,
                None if chosen is None else chosen.contiguous(),
                out,
                num_rows,
                WIDTH=width,
                GROUPS=self.scales.shape[1],
                BITS=self.bits,
                ZEROS=self.zeros is not None,
                CHOSEN=chosen is not None,
                TILE=TILE,
                DEPTH=DEPTH,
                num_warps=NUM_WARPS,
            )
        return out


def can_pack(source: Grouped) -> bool:
    """Whether kernels compute with such groups: of a power of two, or a single one; and 4 bits in whole blocks."""
    least = BLOCK if source.bits == 4 else BLOCK // 2
    is_fit = source.scales.shape[1] == 1 or (source.group >= least and source.group & source.group - 1 == 0)
    return is_fit and (source.bits == 8 or source.shape[1] % BLOCK == 0)


@triton.jit
def _of_groups(
    values,
    output,
    first,
    has_output,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """[TILE, DEPTH] float32: of each byte from `first` on the scale, or the zero, of its group. It is read once a group, since a
    group is a power of two, or all there is.
    """
    SPAN: tl.constexpr = DEPTH if PER_GROUP > DEPTH or GROUPS == 1 else PER_GROUP
    COUNT: tl.constexpr = DEPTH // SPAN
    group = (first + tl.arange(0, COUNT) * SPAN) // PER_GROUP
    offset = output.to(tl.int64)[:, None] * GROUPS + group[None, :]
    result = tl.load(values + offset, mask=has_output & (group < GROUPS)[None, :], other=0).to(tl.float32)
    return tl.reshape(tl.broadcast_to(result[:, :, None], [TILE, COUNT, SPAN]), [TILE, DEPTH])


@triton.jit
def scales_of(
    scales,
    zeros,
    output,
    first,
    has_output,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    ZEROS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Scales and zeros of a tile of bytes; without BITS nothing is packed, and they mean nothing."""
    scale = tl.full([1, 1], 1.0, tl.float32)
    zero = tl.full([1, 1], 1 << BITS >> 1, tl.float32)
    if BITS:
        scale = _of_groups(scales, output, first, has_output, GROUPS, WIDTH // GROUPS, TILE, DEPTH)
        if ZEROS:
            zero = _of_groups(zeros, output, first, has_output, GROUPS, WIDTH // GROUPS, TILE, DEPTH)
    return scale, zero


@triton.jit
def numbers_of(stored, scale, zero, half: tl.constexpr, BITS: tl.constexpr):
    """What bytes stand for, float32: all of each, or of two numbers to a byte those of the low half (0) or the high one (1)."""
    if BITS == 4:
        stored = (stored >> (4 * half)) & 15
    return (stored.to(tl.float32) - zero) * scale


@triton.jit
def _raised_bytes(stored):
    """2^23 + each byte, float32: by a permute each, since few units of a multiprocessor can convert integers."""
    if INTERPRETED:
        result = stored.to(tl.float32) + 8388608.0
    else:
        result = tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $4, 0x4B000000, 0x7650;
            prmt.b32 $1, $4, 0x4B000000, 0x7651;
            prmt.b32 $2, $4, 0x4B000000, 0x7652;
            prmt.b32 $3, $4, 0x4B000000, 0x7653;
            """,
            "=&f,=&f,=&f,=&f,r",
            [stored],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
    return result


@triton.jit
def _halves(stored):
    """The low half of each byte, and the high one: of four bytes at a time."""
    if INTERPRETED:
        low, high = stored & 15, stored >> 4
    else:
        low, high = tl.inline_asm_elementwise(
            """
            and.b32 $0, $2, 0x0F0F0F0F;
            shr.u32 $1, $2, 4;
            and.b32 $1, $1, 0x0F0F0F0F;
            """,
            "=&r,=&r,r",
            [stored],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def raised_numbers(stored, BITS: tl.constexpr):
    """2^23 + what bytes stand for, float32: (each,), or if there are two numbers to a byte (low half, high half)."""
    if BITS == 4:
        low, high = _halves(stored)
        result = _raised_bytes(low), _raised_bytes(high)
    else:
        result = (_raised_bytes(stored),)  # type: ignore[assignment]
    return result


@triton.jit
def raised_zeros(zeros, first, offset, BITS: tl.constexpr, ZEROS: tl.constexpr):
    """2^23 + the zeros at first + offset, float32; a raised number less its zero is exact."""
    if ZEROS:
        result = (tl.load(zeros + first + offset).to(tl.int32) | RAISED).to(tl.float32, bitcast=True)
    else:
        result = tl.full(offset.shape, 8388608.0 + (1 << BITS >> 1), tl.float32)
    return result


@triton.jit
def column_of(offset, half: tl.constexpr, BITS: tl.constexpr):
    """The inputs that stand at these bytes of a row, in one half of them if there are two to a byte."""
    if BITS == 4:
        offset = offset // 16 * 32 + half * 16 + offset % 16
    return offset


@triton.jit
def _dequantize_kernel(
    numbers,
    scales,
    zeros,
    chosen,
    out,
    num_rows,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    ZEROS: tl.constexpr,
    CHOSEN: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Program (i, j): bytes [j * DEPTH, (j + 1) * DEPTH) of rows [i * TILE, (i + 1) * TILE), or of those that are chosen."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    first = tl.program_id(1) * DEPTH
    offset = first + tl.arange(0, DEPTH)
    has_row = (row < num_rows)[:, None]
    output = row.to(tl.int64)
    if CHOSEN:
        output = tl.load(chosen + row, mask=row < num_rows, other=0)
    mask = has_row & (offset < WIDTH)[None, :]
    stored = tl.load(numbers + output[:, None] * WIDTH + offset[None, :], mask=mask, other=0)
    scale, zero = scales_of(scales, zeros, output, first, has_row, BITS, GROUPS, ZEROS, WIDTH, TILE, DEPTH)
    target = out + row.to(tl.int64)[:, None] * (WIDTH * 8 // BITS)
    for half in tl.static_range(8 // BITS):
        values = numbers_of(stored, scale, zero, half, BITS)
        tl.store(target + column_of(offset, half, BITS)[None, :], values.to(out.dtype.element_ty), mask=mask)
