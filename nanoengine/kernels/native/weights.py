"""Weights as the native kernels read them: in panels of outputs, of numbers or quantized (panels.h, quantized_format.h)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nanoengine.kernels.memory import Arena
from nanoengine.kernels.native.addresses import DTYPES, WrongTensor, address
from nanoengine.kernels.native.c_functions import c_functions
from nanoengine.kernels.operations import WeightRows
from nanoengine.kernels.quantized.ggml_blocks import GGMLBlocks
from nanoengine.kernels.quantized.ggml_numbers import dequantize
from nanoengine.kernels.quantized.nvfp4 import NVFP4
from nanoengine.kernels.quantized.tensor import Grouped, QuantizedTensor

CELL = 32
"""Inputs of one cell of a quantized weight."""

SCALES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
PLAIN, MINIMUM, ZERO_POINT, CELL_FACTORS, HALF_CELL_FACTORS, SIGNED_CELL_FACTORS, HALF_CELL_FLOATS, HALF_CELL_PAIRS = (
    range(8)
)
"""What the scales of a span come with, as quantized_format.h numbers them."""

NO_CODEBOOK, IQ4, E2M1, IQ3_S_SIZES, IQ3_XXS_SIZES, IQ2_SIZES = range(6)
"""What numbers are places in, as quantized_format.h numbers them."""


ALL_INPUTS = 1 << 30
"""A span that stands for a whole row, however long."""


class Panels(NamedTuple):
    """How numbers lie in panels: bits of a number, type of scales, what scales come with, and inputs that share one."""

    bits: int
    scales: torch.dtype
    extra: int
    span: int
    codebook: int = NO_CODEBOOK

    @property
    def code(self) -> int:
        return self.bits | SCALES[self.scales] << 8 | self.extra << 16 | self.codebook << 24 | self.span << 32

    @property
    def weight_bits(self) -> float:
        """Bits of memory that a weight takes, its share of scales included."""
        scales = 2 if self.extra in (MINIMUM, CELL_FACTORS, HALF_CELL_PAIRS) else 1
        factors = {PLAIN: 0, MINIMUM: 0, SIGNED_CELL_FACTORS: 1}.get(self.extra, 2)
        return self.bits + scales * 8 * self.scales.itemsize / self.span + factors * 8 / CELL


BLOCKS = {
    "Q4_0": Panels(4, torch.float16, PLAIN, 32),
    "Q4_1": Panels(4, torch.float16, MINIMUM, 32),
    "Q5_0": Panels(5, torch.float16, PLAIN, 32),
    "Q5_1": Panels(5, torch.float16, MINIMUM, 32),
    "Q8_0": Panels(8, torch.float16, PLAIN, 32),
    "Q4_K": Panels(4, torch.float16, CELL_FACTORS, 256),
    "Q5_K": Panels(5, torch.float16, CELL_FACTORS, 256),
    "Q6_K": Panels(6, torch.float16, HALF_CELL_FACTORS, 256),
    "Q3_K": Panels(3, torch.float16, HALF_CELL_FACTORS, 256),
    "IQ4_NL": Panels(4, torch.float16, PLAIN, 32, IQ4),
    "IQ4_XS": Panels(4, torch.float16, SIGNED_CELL_FACTORS, 256, IQ4),
    "MXFP4": Panels(4, torch.bfloat16, PLAIN, 32, E2M1),
    "Q2_K": Panels(2, torch.float16, HALF_CELL_PAIRS, 256),
    "IQ3_S": Panels(4, torch.float16, SIGNED_CELL_FACTORS, 256, IQ3_S_SIZES),
    "IQ3_XXS": Panels(4, torch.float32, SIGNED_CELL_FACTORS, 256, IQ3_XXS_SIZES),
    "IQ2_S": Panels(3, torch.float32, HALF_CELL_FACTORS, 256, IQ2_SIZES),
    "IQ2_XS": Panels(3, torch.float32, HALF_CELL_FACTORS, 256, IQ2_SIZES),
    "IQ2_XXS": Panels(3, torch.float32, HALF_CELL_FACTORS, 256, IQ2_SIZES),
    "NVFP4": Panels(4, torch.float32, HALF_CELL_FLOATS, ALL_INPUTS, E2M1),
}
"""Formats of ggml that panels keep, in the order in which pack.cpp numbers them; all others become numbers."""

AS_THEY_ARE, IN_OTHER_TYPE = 1, 4
ROUNDED = {"int8": 2, "int16": 8}
"""How panels want rows of x, as panels.h numbers it."""


class Segment(NamedTuple):
    """Some outputs of a weight in one format."""

    memory: Tensor  # uint8, whole panels
    code: int  # of the format, for the kernels: `Panels.code`; of numbers their bits
    name: str  # of the format, for people
    outputs: int

    @property
    def is_quantized(self) -> bool:
        return bool(self.code >> 8)


class Packer:
    """Puts matrices into panels.

    Args:
        c: functions of the library whose kernels will read them.
    """

    def __init__(self, c: SimpleNamespace):
        self.c, self.panel_width = c, int(c.panel_width())
        self.arena = Arena()

    def numbers(self, outputs: int, inputs: int, dtype: torch.dtype) -> Segment:
        """Room for numbers; all are zero."""
        return self._segment(8 * dtype.itemsize, str(dtype).removeprefix("torch."), outputs, inputs)

    def quantized(self, source: QuantizedTensor) -> Segment | None:
        """A quantized matrix; None if the kernels do not know its format."""
        if isinstance(source, GGMLBlocks) and source.format == "NVFP4":
            source = NVFP4.of_blocks(source.data, source.shape)
        if isinstance(source, NVFP4):
            return self._floats(source)
        if isinstance(source, GGMLBlocks):
            return self._blocks(source) if source.format in BLOCKS else None
        if isinstance(source, Grouped) and (source.group % CELL == 0 or source.scales.shape[1] == 1):
            return self._groups(source)
        return None

    def panels(self, segment: Segment, first: int, inputs: int) -> Tensor:
        """Of each panel: address, format, first output and number of outputs, [panels, 4] int64."""
        starts = torch.arange(0, segment.outputs, self.panel_width, dtype=torch.int64, device="cpu")
        size = self.c.panels_size(segment.code, self.panel_width, inputs)
        addresses = starts // self.panel_width * size + segment.memory.data_ptr()
        columns = (segment.outputs - starts).clamp(max=self.panel_width)
        return torch.stack((addresses, torch.full_like(starts, segment.code), starts + first, columns), 1)

    def _blocks(self, source: GGMLBlocks) -> Segment:
        segment = self._segment(BLOCKS[source.format].code, source.format, *source.shape)
        blocks, number = source.data.contiguous(), list(BLOCKS).index(source.format)
        pointers = address(blocks, torch.uint8), segment.memory.data_ptr()
        self.c.pack_blocks(number, segment.code, *pointers, *source.shape)
        return segment

    def _groups(self, source: Grouped) -> Segment:
        extra, span = PLAIN if source.zeros is None else ZERO_POINT, -(-source.group // CELL) * CELL
        code = Panels(source.bits, source.scales.dtype, extra, span).code
        segment = self._segment(code, source.format, *source.shape)
        numbers, scales = source.numbers.contiguous(), source.scales.contiguous()
        zeros = None if source.zeros is None else source.zeros.contiguous()
        scaled = address(scales, source.scales.dtype), address(zeros, torch.uint8, scales.numel())
        groups = address(numbers, torch.uint8, source.shape.numel()), *scaled
        self.c.pack_groups(segment.code, *groups, segment.memory.data_ptr(), *source.shape)
        return segment

    def _floats(self, source: NVFP4) -> Segment:
        """All of a row share a float32: half the factor, as the codebook has twice the numbers."""
        span = -(-source.shape[1] // CELL) * CELL
        segment = self._segment(BLOCKS["NVFP4"]._replace(span=span).code, source.format, *source.shape)
        numbers, factors = source.numbers.contiguous(), (source.factors * 0.5).contiguous()
        scales = pad(source.scales, (0, source.scales.shape[1] % 2)).contiguous()  # of whole cells
        groups = address(numbers, torch.uint8), address(factors, torch.float32), address(scales, torch.uint8)
        self.c.pack_groups(segment.code, *groups, segment.memory.data_ptr(), *source.shape)
        return segment

    def _segment(self, code: int, name: str, outputs: int, inputs: int) -> Segment:
        return Segment(self.arena.zeros(self.c.panels_size(code, outputs, inputs)), code, name, outputs)


class NativeWeight:
    """A matrix [outputs, inputs], filled part by part from a checkpoint; each part keeps its own format.

    Args:
        activation_dtype: the precision of activations in products with quantized parts: see `KernelOptions`.
    """

    def __init__(self, packer: Packer, outputs: int, inputs: int, dtype: torch.dtype, *, activation_dtype: str):
        self.shape = torch.Size((outputs, inputs))
        self.dtype = dtype
        self.segments: dict[int, Segment] = {}
        plain = AS_THEY_ARE if activation_dtype == str(dtype).removeprefix("torch.") else IN_OTHER_TYPE
        self._packer, self._kind = packer, ROUNDED.get(activation_dtype, plain)

    def rows(self, first: int, count: int) -> WeightRows:
        assert first + count <= self.shape[0]
        return WeightRows(self, first, count)

    def formats(self) -> Mapping[str, int]:
        total: Counter[str] = Counter()
        for segment in self.segments.values():
            total[segment.name] += segment.memory.nbytes
        return total

    @cached_property
    def address(self) -> int:
        """Of the weight as C has it (panels.h)."""
        return self._table.data_ptr()

    @cached_property
    def halves_match(self) -> bool:
        """Whether the panels of the second half of the outputs are cut like those of the first."""
        firsts, half = self._table[1:, 2], self.shape[0] // 2
        count = len(firsts) // 2
        return len(firsts) == 2 * count and torch.equal(firsts[:count] + half, firsts[count:])

    def put_numbers(self, first: int, source: Tensor) -> None:
        source = source.to(self.dtype).contiguous()
        start, segment = self._room_for_numbers(first, len(source))
        numbers = DTYPES[self.dtype], address(source, self.dtype, len(source) * self.shape[1])
        self._packer.c.pack_numbers(*numbers, segment.memory.data_ptr(), first - start, *source.shape)

    def put_quantized(self, first: int, source: QuantizedTensor) -> None:
        if source.shape[1] != self.shape[1]:
            raise WrongTensor(f"rows {list(source.shape)} are none of a weight {list(self.shape)}")
        segment = self._packer.quantized(source)
        if segment is None:
            self.put_numbers(first, source.dequantize(self.dtype))
        else:
            self._put(first, segment)

    def _room_for_numbers(self, first: int, count: int) -> tuple[int, Segment]:
        """The segment of numbers that these outputs belong to, and its first output; it is new if there was none."""
        for start, segment in self.segments.items():
            if start <= first and first + count <= start + segment.outputs and not segment.is_quantized:
                return start, segment
        return first, self._put(first, self._packer.numbers(count, self.shape[1], self.dtype))

    def _put(self, first: int, segment: Segment) -> Segment:
        self.segments[first] = segment
        for name in ("address", "halves_match", "_table"):
            self.__dict__.pop(name, None)  # they are of the segments before
        return segment

    @cached_property
    def _table(self) -> Tensor:
        """A row of outputs, inputs, number of panels and kinds, then all panels: [1 + panels, 4] int64."""
        if sum(segment.outputs for segment in self.segments.values()) != self.shape[0]:
            raise WrongTensor(f"rows of a weight {list(self.shape)} were not filled")
        firsts = sorted(self.segments)
        panels = torch.cat([self._packer.panels(self.segments[first], first, self.shape[1]) for first in firsts])
        are_quantized = {segment.is_quantized for segment in self.segments.values()}
        kinds = AS_THEY_ARE * (False in are_quantized) | self._kind * (True in are_quantized)
        return torch.cat((torch.tensor([[*self.shape, len(panels), kinds]], dtype=torch.int64, device="cpu"), panels))


def dequantized(source: GGMLBlocks, dtype: torch.dtype) -> Tensor:
    """The numbers of a matrix, by all threads: [outputs, inputs]."""
    if source.format not in BLOCKS:
        return dequantize(source.data, source.format, source.shape, dtype)
    outputs, inputs = source.shape
    weight = NativeWeight(Packer(c_functions()), outputs, inputs, dtype, activation_dtype="float32")
    out = torch.empty(outputs, inputs, dtype=dtype, device="cpu")
    weight.put_quantized(0, source)
    c_functions().unpack(DTYPES[dtype], weight.address, out.data_ptr())
    return out
