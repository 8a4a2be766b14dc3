"""Weights of a rank, which has some outputs of each matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from nanoengine.core.kernels import WeightSlot
from nanoengine.kernels.operations import ExpertWeights, QuantizableWeight, QuantizedSlot
from nanoengine.kernels.quantized.tensor import QuantizedExperts, QuantizedTensor


class PartOfRows:
    """A slot for a whole matrix, of which the rows in some ranges are kept; the other rows are dropped.

    Args:
        pieces: ranges of rows of the source, and the slot of each.
    """

    def __init__(self, shape: torch.Size, pieces: Sequence[tuple[range, QuantizedSlot]]):
        self.shape, self.pieces = shape, pieces

    def parts(
        self, source: Tensor | QuantizedTensor | QuantizedExperts
    ) -> Iterator[tuple[Tensor | QuantizedTensor, WeightSlot]]:
        assert not isinstance(source, QuantizedExperts)
        for rows, place in self.pieces:
            yield source[slice(rows.start, rows.stop)], place

    def copy_(self, source: Tensor) -> None:
        for rows, place in self.pieces:
            place.copy_(source[rows.start : rows.stop])

    def copy_quantized(self, source: QuantizedTensor) -> None:
        for rows, place in self.pieces:
            place.copy_quantized(source[slice(rows.start, rows.stop)])


class PartialWeight:
    """A matrix of which this rank has some outputs, in `own`: of each projection the outputs in a range.

    Args:
        shape: of the whole matrix, (outputs, inputs).
        ranges: this rank's outputs of each projection.
        columns: the outputs of every rank, if they are gathered; None: a rank goes on with its own outputs.
    """

    def __init__(
        self, own: QuantizableWeight, shape: tuple[int, int], ranges: Sequence[range], columns: list[range] | None
    ):
        self.own, self.shape, self.ranges, self.columns = own, torch.Size(shape), ranges, columns
        self._bias: Tensor | None = None

    def formats(self) -> Mapping[str, int]:
        return self.own.formats()

    def rows(self, first: int, count: int) -> PartOfRows:
        pieces, at = [], 0
        for own in self.ranges:
            start, stop = max(own.start, first), min(own.stop, first + count)
            if start < stop:
                place = self.own.rows(at + start - own.start, stop - start)
                pieces.append((range(start - first, stop - first), place))
            at += len(own)
        return PartOfRows(torch.Size((count, self.shape[1])), pieces)

    def bias(self, whole: Tensor | None) -> Tensor | None:
        """The part of a loaded bias that is added to this rank's outputs."""
        if whole is None:
            return None
        if self._bias is None:
            self._bias = torch.cat([whole[own.start : own.stop] for own in self.ranges])
        return self._bias


class PartialExperts(ExpertWeights):
    """Matrices of experts of which this rank has the outputs in `columns[rank]`."""

    def __init__(self, own: ExpertWeights, shape: tuple[int, int, int], columns: list[range], rank: int):
        self.own, self.shape, self.range, self.columns = own, torch.Size(shape), columns[rank], columns
        self._bias: Tensor | None = None

    def formats(self) -> Mapping[str, int]:
        return self.own.formats()

    def expert(self, index: int) -> PartOfRows:
        return PartOfRows(self.shape[1:], [(self.range, self.own.expert(index))])

    def bias(self, whole: Tensor) -> Tensor:
        """The part of a loaded bias [experts, outputs] that is added to this rank's outputs."""
        if self._bias is None:
            self._bias = whole[:, self.range.start : self.range.stop].contiguous()
        return self._bias
