"""Layout: the tensors of one quantized layer in a checkpoint, and their conversion to a matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from nanoengine.errors import InvalidWeights
from nanoengine.kernels.quantized.tensor import Grouped, QuantizedTensor
from nanoengine.models.quantization.scheme import Scheme

CELL = 32
"""Inputs of a block in CPU kernels: groups of a multiple of it stay quantized, others are dequantized."""

SCALES = ("F16", "BF16", "F32")
INDICES = ("I32", "I64")

Shape = tuple[int, ...]


class Part(NamedTuple):
    """The valid headers of a tensor."""

    allowed: dict[str, tuple[Shape, ...]]
    """Valid dtypes, and the valid shapes of each."""

    needed: bool = True


class Layout(ABC):
    """The tensors `prefix.suffix` of a layer `prefix`; other suffixes than in `parts` have no effect.

    Most layouts are integers with scales for groups of inputs.
    """

    body: str
    """Suffix of the tensor with the numbers. A layer with this tensor is quantized, unless the tensor is a float weight."""

    suffixes: tuple[str, ...]
    """Suffixes of the other tensors."""

    early: Set[str] = frozenset(("g_idx", "weight_g_idx"))
    """Suffixes of small tensors that are checked before loading."""

    def __init__(self, scheme: Scheme):
        self.scheme, self.per_word = scheme, 32 // scheme.bits
        self.stays_packed = (scheme.group or CELL) % CELL == 0
        """Whether the matrix stays quantized in CPU kernels."""

    def check(self, name: str, shape: tuple[int, int], early: Mapping[str, Tensor]) -> None:
        """Check the small tensors of a layer.

        Raises:
            InvalidWeights: an order of inputs that is not computed.
        """
        group = self.scheme.group or shape[1]
        in_order = torch.arange(shape[1], dtype=torch.int64, device="cpu") // group
        for suffix, order in early.items():
            if suffix.endswith("g_idx") and not torch.equal(order.long(), in_order):
                raise InvalidWeights(
                    f"{suffix} of {name} groups inputs in another order (desc_act true, or actorder 'group'): only {group} "
                    "neighbours in each are computed; use a checkpoint that was quantized without"
                )

    def shape(self, body: Sequence[int]) -> tuple[int, int]:
        """Outputs and inputs of a layer by the shape of its body."""
        return body[0], body[1]

    @abstractmethod
    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        """The valid headers of its tensors by suffix, the body included."""

    @abstractmethod
    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> QuantizedTensor | Tensor:
        """The matrix [outputs, inputs] of tensors with valid headers; dense if no quantized tensor can represent it."""

    def groups(self, inputs: int) -> int:
        return 1 if self.scheme.group is None else -(-inputs // self.scheme.group)

    def words(self, count: int) -> int:
        return -(-count // self.per_word)

    def grouped(self, numbers: Tensor, scales: Tensor, zeros: Tensor | None) -> Grouped:
        bits = self.scheme.bits
        if zeros is not None:
            zeros = None if bool((zeros == 1 << bits - 1).all()) else zeros.contiguous()
        return Grouped(numbers, scales.contiguous(), zeros, bits)


def scale_shapes(outputs: int, groups: int) -> tuple[Shape, ...]:
    """Valid shapes of scales: for each output and group, for each output, or one."""
    return ((outputs, groups), (outputs,), (1,), ()) if groups == 1 else ((outputs, groups),)


def expand_rows(values: Tensor, outputs: int) -> Tensor:
    """Expand one of `scale_shapes` to a row for each output."""
    if values.dim() < 2:
        values = values.reshape(-1, 1)
    return values.expand(outputs, -1).contiguous()


def to_unsigned(numbers: Tensor, bits: int) -> Tensor:
    """Signed integers to unsigned ones of as many bits, by an offset."""
    return numbers.view(torch.uint8) + (1 << bits - 1)


def unpack(words: Tensor, bits: int) -> Tensor:
    """[rows, n] int32 -> [rows, n * 32 / bits] uint8, the first number in the lowest bits; the host is little-endian."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    pairs = octets.to(torch.int16)
    pairs |= pairs << 4
    pairs &= 0x0F0F
    return pairs.view(torch.uint8)
