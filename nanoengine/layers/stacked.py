"""Experts whose matrices a checkpoint has in one tensor, one behind the other (Granite 4, Qwen3.5)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nanoengine.kernels.interface import ExpertWeights, WeightSlot
from nanoengine.quantization.tensor import QuantizedExperts, QuantizedTensor


class StackedExperts:
    """A place in parts for [experts, len(weights) * outputs, inputs]: the rows of each weight behind those of the one before."""

    def __init__(self, *weights: ExpertWeights):
        self.weights = weights
        experts, self.outputs, inputs = weights[0].shape
        self.shape = torch.Size((experts, len(weights) * self.outputs, inputs))

    def parts(self, source: Tensor | QuantizedExperts) -> Iterator[tuple[Tensor | QuantizedTensor, WeightSlot]]:
        """Each matrix of an expert, and its place."""
        for number in range(self.shape[0]):
            expert = source[number] if isinstance(source, Tensor) else source.expert(number)
            for i, weights in enumerate(self.weights):
                yield expert[torch.arange(i * self.outputs, (i + 1) * self.outputs)], weights.expert(number)

    def copy_(self, source: Tensor) -> None:
        for matrix, place in self.parts(source):
            assert isinstance(matrix, Tensor)
            place.copy_(matrix)
