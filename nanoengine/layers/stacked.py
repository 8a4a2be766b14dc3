"""Experts whose matrices a checkpoint has in one tensor, one behind the other (Granite 4, Qwen3.5, Llama 4)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nanoengine.kernels.interface import ExpertWeights, WeightSlot
from nanoengine.quantization.tensor import QuantizedExperts, QuantizedTensor


class StackedExperts:
    """A place in parts for [experts, len(weights) * outputs, inputs]: the rows of each weight behind those of the one before.

    Args:
        weights: of all experts.
        transposed: whether what is copied has inputs before outputs.
    """

    def __init__(self, *weights: ExpertWeights, transposed: bool = False):
        self.weights, self.transposed = weights, transposed
        experts, self.outputs, inputs = weights[0].shape
        rows = len(weights) * self.outputs
        self.shape = torch.Size((experts, inputs, rows) if transposed else (experts, rows, inputs))

    def parts(self, source: Tensor | QuantizedExperts) -> Iterator[tuple[Tensor | QuantizedTensor, WeightSlot]]:
        """Each matrix of an expert, and its place."""
        own = torch.arange(len(self.weights) * self.outputs, dtype=torch.int64, device="cpu")
        for number in range(self.shape[0]):
            expert = source[number] if isinstance(source, Tensor) else source.expert(number)
            if self.transposed:
                assert isinstance(expert, Tensor)  # rows of blocks cannot become columns
                expert = expert.T.contiguous()
            for i, weights in enumerate(self.weights):
                yield expert[own[i * self.outputs : (i + 1) * self.outputs]], weights.expert(number)

    def copy_(self, source: Tensor) -> None:
        for matrix, place in self.parts(source):
            assert isinstance(matrix, Tensor)
            place.copy_(matrix)
