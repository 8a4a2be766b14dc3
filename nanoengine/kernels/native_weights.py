"""Weights as the native kernels read them: numbers in panels (panels.h), or quantized panels (quantized_format.h)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from nanoengine.gguf.blocks import GGMLBlocks
from nanoengine.kernels.addresses import DTYPES
from nanoengine.kernels.c_functions import c_functions
from nanoengine.kernels.memory import zeros_in_huge_pages
from nanoengine.kernels.native_operations import QUANTIZED
from nanoengine.quantization.tensor import Grouped, QuantizedTensor

PANEL = 32
"""A multiple of the outputs that lie together, for any CPU."""

CELL = 32
"""Inputs that lie together in a quantized weight."""

SCALES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
PLAIN, MINIMUM, ZERO_POINT, CELL_FACTORS, HALF_CELL_FACTORS = range(5)
"""What the scales of a span come with, as quantized_format.h numbers them."""

SPANS = {
    "Q4_0": (4, PLAIN, 32),
    "Q4_1": (4, MINIMUM, 32),
    "Q5_0": (5, PLAIN, 32),
    "Q5_1": (5, MINIMUM, 32),
    "Q8_0": (8, PLAIN, 32),
    "Q4_K": (4, CELL_FACTORS, 256),
    "Q5_K": (5, CELL_FACTORS, 256),
    "Q6_K": (6, HALF_CELL_FACTORS, 256),
}
"""Formats of ggml: bits of a number, what scales come with, and inputs that share one; all scales are float16."""


class Segment(NamedTuple):
    """Some outputs of a weight in one format."""

    memory: Tensor  # uint8
    code: int  # of the format, for the kernels
    name: str  # of the format, for people
    outputs: int


class NativeWeight:
    """A matrix [outputs, inputs], filled part by part from a checkpoint.

    Parts that come quantized stay so, each in its own format, if all do; otherwise all are numbers.

    Args:
        filled: outputs that are filled; None: all.
    """

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype, filled: int | None = None):
        self.shape = torch.Size((outputs, inputs))
        self.dtype = dtype
        self.segments: dict[int, Segment] = {}
        self._filled = outputs if filled is None else filled
        self._numbers: Tensor | None = None

    def rows(self, first: int, count: int) -> NativeRows:
        assert first + count <= self.shape[0]
        return NativeRows(self, first, count)

    @property
    def is_quantized(self) -> bool:
        return bool(self.segments)

    def formats(self) -> Mapping[str, int]:
        if not self.is_quantized:
            return {str(self.dtype).removeprefix("torch."): self.numbers.nbytes}
        total: Counter[str] = Counter()
        for segment in self.segments.values():
            total[segment.name] += segment.memory.nbytes
        return total

    @property
    def numbers(self) -> Tensor:
        """Packed dwords, int32; those of rows that nobody filled are zero."""
        if self._numbers is None:
            size = c_functions().packed_size(DTYPES[self.dtype], *self.shape)
            self._numbers = zeros_in_huge_pages([size], torch.int32)
        return self._numbers

    @cached_property
    def table(self) -> Tensor:
        """Of all quantized panels: address, format, first output and number of outputs, [panels, 4] int64."""
        assert sum(segment.outputs for segment in self.segments.values()) == self._filled, "rows were not filled"
        return torch.cat([self._panels(first) for first in sorted(self.segments)])

    @cached_property
    def halves_match(self) -> bool:
        """Whether the panels of the second half of the outputs are cut like those of the first."""
        half = self.shape[0] // 2
        if not self.is_quantized:
            return half % PANEL == 0
        firsts = self.table[:, 2]
        count = len(firsts) // 2
        return len(firsts) == 2 * count and torch.equal(firsts[:count] + half, firsts[count:])

    def as_numbers(self) -> Tensor:
        """`numbers`, of what is quantized too: it is so no more."""
        for start, segment in self.segments.items():
            self._pack(start, self._dequantize(start, segment.outputs))
        self.segments.clear()
        return self.numbers

    def put_numbers(self, first: int, source: Tensor) -> None:
        self.as_numbers()
        self._pack(first, source)

    def put_quantized(self, first: int, source: QuantizedTensor) -> None:
        segment = None if self._numbers is not None else new_segment(source)
        if segment is None:
            self.put_numbers(first, source.dequantize(self.dtype))
        else:
            self.segments[first] = segment

    def _pack(self, first: int, source: Tensor) -> None:
        source = source.to(self.dtype).contiguous()
        c_functions().pack(DTYPES[self.dtype], source.data_ptr(), self.numbers.data_ptr(), first, *source.shape)

    def _dequantize(self, first: int, count: int) -> Tensor:
        panels, ids = self._panels(first), torch.arange(first, first + count)
        numbers = torch.empty(count, self.shape[1], dtype=self.dtype)
        addresses = ids.data_ptr(), panels.data_ptr(), len(panels), numbers.data_ptr()
        c_functions().quantized_embed(DTYPES[self.dtype], *addresses, count, self.shape[1])
        return numbers

    def _panels(self, first: int) -> Tensor:
        segment, width = self.segments[first], panel_width()
        starts = torch.arange(0, segment.outputs, width)
        size = c_functions().quantized_size(segment.code, width, self.shape[1])
        addresses = starts // width * size + segment.memory.data_ptr()
        columns = (segment.outputs - starts).clamp(max=width)
        return torch.stack((addresses, torch.full_like(starts, segment.code), starts + first, columns), 1)


class NativeRows:
    """Rows [first, first + count) of a weight."""

    def __init__(self, weight: NativeWeight, first: int, count: int):
        self.weight, self.first = weight, first
        self.shape = torch.Size((count, weight.shape[1]))

    def copy_(self, source: Tensor) -> None:
        assert source.shape == self.shape
        self.weight.put_numbers(self.first, source)

    def copy_quantized(self, source: QuantizedTensor) -> None:
        assert source.shape == self.shape
        self.weight.put_quantized(self.first, source)


class NativeExperts:
    """The matrices of experts, as one weight in which each begins with a panel of its own."""

    def __init__(self, experts: int, outputs: int, inputs: int, dtype: torch.dtype):
        self.shape = torch.Size((experts, outputs, inputs))
        self._step = -(-outputs // panel_width()) * panel_width()
        self.weight = NativeWeight(experts * self._step, inputs, dtype, filled=experts * outputs)

    def formats(self) -> Mapping[str, int]:
        return self.weight.formats()

    def expert(self, index: int) -> NativeRows:
        return self.weight.rows(index * self._step, self.shape[1])


def new_segment(source: QuantizedTensor) -> Segment | None:
    """A quantized matrix in panels; None if the kernels know no such format."""
    if isinstance(source, GGMLBlocks):
        bits, extra, span = SPANS[source.type]
        segment = _unset(source, bits, SCALES[torch.float16], extra, span)
        blocks = source.data.contiguous()
        addresses = blocks.data_ptr(), segment.memory.data_ptr()
        c_functions().quantized_pack_blocks(QUANTIZED.index(source.type), *addresses, *source.shape)
        return segment
    if not isinstance(source, Grouped):
        return None
    one_group = source.scales.shape[1] == 1
    if source.group % CELL and not one_group:
        return None
    extra = PLAIN if source.zeros is None else ZERO_POINT
    segment = _unset(source, source.bits, SCALES[source.scales.dtype], extra, -(-source.group // CELL) * CELL)
    numbers, scales = source.numbers.contiguous(), source.scales.contiguous()
    zeros = None if source.zeros is None else source.zeros.contiguous()
    groups = numbers.data_ptr(), scales.data_ptr(), None if zeros is None else zeros.data_ptr()
    c_functions().quantized_pack_groups(segment.code, *groups, segment.memory.data_ptr(), *source.shape)
    return segment


@cache
def panel_width() -> int:
    """Outputs of a panel, on this CPU."""
    return int(c_functions().packed_size(DTYPES[torch.float32], 1, 1))


def _unset(source: QuantizedTensor, bits: int, scale: int, extra: int, span: int) -> Segment:
    code = bits | scale << 8 | extra << 16 | span << 32
    size = c_functions().quantized_size(code, *source.shape)
    return Segment(zeros_in_huge_pages([size], torch.uint8), code, source.format, source.shape[0])
