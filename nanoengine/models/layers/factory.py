"""Factory: where layers get their parameters from, each on the right device and in the right dtype from the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanoengine.core.layers import WeightFactory
from nanoengine.kernels.operations import ExpertWeights, Kernels, QuantizableWeight
from nanoengine.models.layers.share import Share
from nanoengine.models.model_config import StateConfig


@dataclass(frozen=True)
class Factory(WeightFactory):
    """Makes the weights of experts too, and remembers all matrices, for those who ask in which formats they are."""

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
        """In float32, whatever the dtype: sinks, and biases of experts."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def share(self, facts: StateConfig) -> Share:
        """The heads, groups and channels of layers with states that this rank computes."""
        return Share(facts)

    def only(self, rows: Sequence[range]) -> Factory:
        """A factory for matrices of which this rank computes only these rows. Without ranks: all rows."""
        return self
