"""LateWeight: a matrix on the device that lies there as its rows come from a checkpoint, in numbers or quantized."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nanoengine.kernels.operations import WeightRows
from nanoengine.kernels.quantized.tensor import Float8, Grouped, QuantizedTensor
from nanoengine.kernels.reference.operations import RowMajor
from nanoengine.kernels.triton.products.float8 import Float8Rows, can_multiply
from nanoengine.kernels.triton.products.packed import PackedWeight, can_pack


class LateWeight:
    """A weight that takes memory when its first rows come: then their format becomes that of all.

    A row of another format makes it a matrix of numbers, and so does a format that no kernel computes with.

    Args:
        outputs, inputs: its shape.
        dtype: of its numbers.
        device: where it lies.
        has_float8: whether kernels multiply floats of 8 bits there.

    Attributes:
        next: the weight that was made next, whose product most likely comes next, too.
    """

    next: LateWeight | None = None

    def __init__(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, *, has_float8: bool = False
    ):
        self.shape = torch.Size((outputs, inputs))
        self.dtype, self.device, self.has_float8 = dtype, device, has_float8
        self._content: RowMajor | PackedWeight | Float8Rows | None = None

    @property
    def content(self) -> RowMajor | PackedWeight | Float8Rows:
        """All its rows; numbers, if none have come."""
        if self._content is None:
            self._content = self._unset()
        return self._content

    def following(self, count: int) -> list[Tensor]:
        """The numbers of the next weights, at most so many; of those in other formats, nothing."""
        if not count or self.next is None:
            return []
        content = self.next.content
        return [*([content.tensor] if isinstance(content, RowMajor) else []), *self.next.following(count - 1)]

    def formats(self) -> Mapping[str, int]:
        content = self.content
        if isinstance(content, RowMajor):
            return content.formats()
        format = "fp8" if isinstance(content, Float8Rows) else f"int{content.bits}"
        return {format: sum(part.nbytes for part in vars(content).values() if isinstance(part, Tensor))}

    def rows(self, first: int, count: int) -> WeightRows:
        return WeightRows(self, first, count)

    def put_numbers(self, first: int, source: Tensor) -> None:
        self._numbers()[first : first + len(source)].copy_(source)

    def put_quantized(self, first: int, source: QuantizedTensor) -> None:
        if self._content is None:
            self._content = self._storage_for(source)
        if isinstance(self._content, RowMajor | None) or not self._content.take_rows(first, source):
            self.put_numbers(first, source.dequantize(self.dtype))

    def _storage_for(self, source: QuantizedTensor) -> PackedWeight | Float8Rows | None:
        if isinstance(source, Grouped) and can_pack(source):
            return PackedWeight.like(source, self.shape[0], self.device)
        if isinstance(source, Float8) and self.has_float8 and can_multiply(source, self.shape[0]):
            return Float8Rows.like(source, self.shape[0], self.device)
        return None

    def _numbers(self) -> Tensor:
        """Its numbers, which it is made of from now on."""
        content = self.content
        if isinstance(content, RowMajor):
            return content.tensor
        self._content = numbers = self._unset()
        numbers.tensor.copy_(content.dequantize(self.dtype))
        return numbers.tensor

    def _unset(self) -> RowMajor:
        outputs, inputs = self.shape
        return RowMajor(outputs, inputs, self.dtype, self.device)
