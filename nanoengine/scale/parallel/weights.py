"""Weights of a rank: some outputs of each matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from nanoengine.core.kernels import WeightSlot
from nanoengine.kernels.operations import ExpertWeights, QuantizableWeight, QuantizedSlot
from nanoengine.kernels.quantized.tensor import QuantizedExperts, QuantizedTensor


class PartOfRows:
    """A slot for a whole matrix: rows in some ranges are copied, and the other rows are dropped.

    Args:
        slots: of each range of rows of the source.
    """

    def __init__(self, shape: torch.Size, slots: Sequence[tuple[range, QuantizedSlot]]):
        self.shape, self.slots = shape, slots

    def parts(
        self, source: Tensor | QuantizedTensor | QuantizedExperts
    ) -> Iterator[tuple[Tensor | QuantizedTensor, WeightSlot]]:
        assert not isinstance(source, QuantizedExperts)
        for rows, slot in self.slots:
            yield source[slice(rows.start, rows.stop)], slot

    def copy_(self, source: Tensor) -> None:
        for rows, slot in self.slots:
            slot.copy_(source[rows.start : rows.stop])

    def copy_quantized(self, source: QuantizedTensor) -> None:
        for rows, slot in self.slots:
            slot.copy_quantized(source[slice(rows.start, rows.stop)])


class PartialWeight:
    """A matrix of which this rank has a `shard`: in each projection, the outputs in a range.

    Args:
        shape: of the whole matrix, (outputs, inputs).
        ranges: this rank's outputs of each projection.
        columns: the outputs of every rank, where they are gathered; None: a rank goes on with its outputs alone.
    """

    def __init__(
        self, shard: QuantizableWeight, shape: tuple[int, int], ranges: Sequence[range], columns: list[range] | None
    ):
        self.shard, self.shape, self.ranges, self.columns = shard, torch.Size(shape), ranges, columns
        self._bias: Tensor | None = None

    def formats(self) -> Mapping[str, int]:
        return self.shard.formats()

    def rows(self, first: int, count: int) -> PartOfRows:
        slots, at = [], 0
        for rows in self.ranges:
            start, stop = max(rows.start, first), min(rows.stop, first + count)
            if start < stop:
                slot = self.shard.rows(at + start - rows.start, stop - start)
                slots.append((range(start - first, stop - first), slot))
            at += len(rows)
        return PartOfRows(torch.Size((count, self.shape[1])), slots)

    def bias(self, whole: Tensor | None) -> Tensor | None:
        """The entries of a loaded bias for this rank's outputs."""
        if whole is None:
            return None
        if self._bias is None:
            self._bias = torch.cat([whole[rows.start : rows.stop] for rows in self.ranges])
        return self._bias


class PartialExperts(ExpertWeights):
    """Matrices of experts of which this rank has the outputs in `columns[rank]`."""

    def __init__(self, shard: ExpertWeights, shape: tuple[int, int, int], columns: list[range], rank: int):
        self.shard, self.shape, self.range, self.columns = shard, torch.Size(shape), columns[rank], columns
        self._bias: Tensor | None = None

    def formats(self) -> Mapping[str, int]:
        return self.shard.formats()

    def expert(self, index: int) -> PartOfRows:
        return PartOfRows(self.shape[1:], [(self.range, self.shard.expert(index))])

    def bias(self, whole: Tensor) -> Tensor:
        """The entries of a loaded bias [experts, outputs] for this rank's outputs."""
        if self._bias is None:
            self._bias = whole[:, self.range.start : self.range.stop].contiguous()
        return self._bias
