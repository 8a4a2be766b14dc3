"""Experts whose matrices a checkpoint has in one tensor: inputs before outputs, rows of gate and up in turn (gpt-oss)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nanoengine.kernels.interface import ExpertWeights, WeightSlot
from nanoengine.quantization.tensor import QuantizedExperts, QuantizedTensor

PAIR = {2: torch.int32, 4: torch.int64}
"""What holds two numbers of so many bytes."""


class InterleavedExperts:
    """A place in parts for [experts, inputs, len(weights) * outputs]: output i of each expert belongs to
    `weights[i % len(weights)]`.
    """

    def __init__(self, *weights: ExpertWeights):
        assert len(weights) <= 2
        self.weights = weights
        experts, outputs, inputs = weights[0].shape
        self.shape = torch.Size((experts, inputs, len(weights) * outputs))

    def parts(self, source: Tensor | QuantizedExperts) -> Iterator[tuple[Tensor | QuantizedTensor, WeightSlot]]:
        """Each matrix of an expert, and its place."""
        count = len(self.weights)
        for number in range(self.shape[0]):
            matrices: Sequence[Tensor | QuantizedTensor]
            if isinstance(source, Tensor):
                matrices = self._transposed(source[number])
            else:
                expert = source.expert(number)
                own = torch.arange(expert.shape[0], dtype=torch.int64, device="cpu")
                matrices = [expert[own[first::count]] for first in range(count)]
            for weights, matrix in zip(self.weights, matrices, strict=True):
                yield matrix, weights.expert(number)

    def copy_(self, source: Tensor) -> None:
        for matrix, place in self.parts(source):
            assert isinstance(matrix, Tensor)
            place.copy_(matrix)

    def _transposed(self, expert: Tensor) -> tuple[Tensor, ...]:
        """[inputs, len(weights) * outputs] -> [outputs, inputs] for each weight."""
        if len(self.weights) == 1:
            return (expert.T.contiguous(),)
        # A pair crosses over as one integer: torch transposes whole matrices by blocks, but not every second row of one.
        pairs = expert.contiguous().view(PAIR[expert.itemsize]).T.contiguous()
        return pairs.view(expert.dtype).view(*pairs.shape, 2).unbind(-1)


class InterleavedColumns:
    """A place for [..., len(places) * width]: column i belongs to `places[i % len(places)]`."""

    def __init__(self, places: Sequence[Tensor]):
        self.places = places
        self.shape = torch.Size((*places[0].shape[:-1], len(places) * places[0].shape[-1]))

    def copy_(self, source: Tensor) -> None:
        for first, place in enumerate(self.places):
            place.copy_(source[..., first :: len(self.places)])
