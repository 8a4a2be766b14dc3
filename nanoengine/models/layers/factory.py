"""Factory: makes the parameters of layers, on their device and in their dtype from the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanoengine.core.layers import WeightFactory
from nanoengine.kernels.operations import ExpertWeights, Kernels, QuantizableWeight
from nanoengine.models.layers.state_partition import StatePartition
from nanoengine.models.model_config import StateConfig


@dataclass(frozen=True)
class Factory(WeightFactory):
    """A weight factory with experts; `matrices` lists all matrices, whose formats are known after loading."""

    kernels: Kernels
    matrices: list[QuantizableWeight | ExpertWeights] = field(default_factory=list)

    def weight(self, inputs: int, *outputs: int) -> QuantizableWeight:
        weight = self.kernels.new_weight(sum(outputs), inputs, self.dtype, self.device)
        self.matrices.append(weight)
        return weight

    def experts(self, experts: int, outputs: int, inputs: int) -> ExpertWeights:
        weights = self.kernels.new_experts(experts, outputs, inputs, self.dtype, self.device)
        self.matrices.append(weights)
        return weights

    def floats(self, *shape: int) -> Tensor:
        """A float32 tensor of any dtype of the model, for sinks and biases of experts."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def partition(self, facts: StateConfig) -> StatePartition:
        """The partition of layers with states; without ranks: all of it."""
        return StatePartition(facts)

    def only(self, rows: Sequence[range]) -> Factory:
        """A factory for matrices whose rows of this rank are `rows`; without ranks: all rows."""
        return self
