"""Layout: what the tensors of one quantized layer must be, and what they stand for."""

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
"""Kernels for CPUs keep whole numbers whose scales are those of a multiple of so many inputs; all others become numbers."""

SCALES = ("F16", "BF16", "F32")
INDICES = ("I32", "I64")

Shape = tuple[int, ...]


class Part(NamedTuple):
    """What the header of a tensor must say."""

    allowed: dict[str, tuple[Shape, ...]]
    """Each dtype that it may have, and shapes that go with it."""

    needed: bool = True


class Layout(ABC):
    """Of a layer `prefix`, the tensors `prefix.suffix`; those that `parts` does not name change nothing here.

    Most are whole numbers, with scales for groups of inputs.
    """

    body: str
    """Suffix of the tensor with the numbers. A layer that has this tensor is quantized, unless it is a plain float weight."""

    suffixes: tuple[str, ...]
    """Of all the others."""

    early: Set[str] = frozenset(("g_idx", "weight_g_idx", "weight_shape"))
    """Suffixes of small tensors, to be looked at before anything is loaded."""

    def __init__(self, scheme: Scheme):
        self.scheme, self.per_word = scheme, 32 // scheme.bits
        self.stays_packed = (scheme.group or CELL) % CELL == 0
        """Whether kernels for CPUs keep what is read as it is."""

    def check(self, name: str, shape: tuple[int, int], early: Mapping[str, Tensor]) -> None:
        """Look at those of them that there are.

        Raises:
            InvalidWeights: they say what is not computed, or contradict the config; the message names one.
        """
        group = self.scheme.group or shape[1]
        for suffix, tensor in early.items():
            own = torch.arange(shape[1], dtype=torch.int64, device="cpu") // group
            if suffix.endswith("g_idx") and not torch.equal(tensor.long(), own):
                raise InvalidWeights(
                    f"{suffix} of {name} groups inputs in an order of its own (desc_act true, or actorder 'group'): only {group} "
                    "neighbours in each are computed; take a checkpoint that was quantized without"
                )
            if suffix == "weight_shape" and tensor.tolist() != list(shape):
                raise InvalidWeights(
                    f"{suffix} of {name} is {tensor.tolist()}, but its words hold {list(shape)} numbers"
                )

    def shape(self, body: Sequence[int]) -> tuple[int, int]:
        """Outputs and inputs of the layer whose body has this shape of two dimensions."""
        return body[0], body[1]

    @abstractmethod
    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        """What the headers of its tensors must say, by suffix, the body among them."""

    @abstractmethod
    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> QuantizedTensor | Tensor:
        """The layer's matrix, of tensors that are as `parts` says; numbers, where no quantized tensor could hold them."""

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
    """Of what there is for each output and group, for each output, or once."""
    return ((outputs, groups), (outputs,), (1,), ()) if groups == 1 else ((outputs, groups),)


def a_row_each(values: Tensor, outputs: int) -> Tensor:
    """What has one of `scale_shapes`, with a row for each output."""
    if values.dim() < 2:
        values = values.reshape(-1, 1)
    return values.expand(outputs, -1).contiguous()


def from_zero(numbers: Tensor, bits: int) -> Tensor:
    """Signed numbers, shifted to begin at 0: as many bits, unsigned."""
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
