"""Factory: where layers get their parameters from, each on the right device and in the right dtype from the start."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanoengine.kernels.interface import ExpertWeights, Kernels, QuantizableWeight


@dataclass(frozen=True)
class Factory:
    """Makes parameters whose values are unset, to be filled from a checkpoint.

    Args:
        kernels: what computes with them, and says how a weight lies in memory.
        dtype, device: of all of them, but for `floats`.
        matrices: those that were made.
    """

    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    matrices: list[QuantizableWeight | ExpertWeights] = field(default_factory=list)

    def weight(self, outputs: int, inputs: int) -> QuantizableWeight:
        weight = self.kernels.new_weight(outputs, inputs, self.dtype, self.device)
        self.matrices.append(weight)
        return weight

    def experts(self, experts: int, outputs: int, inputs: int) -> ExpertWeights:
        weights = self.kernels.new_experts(experts, outputs, inputs, self.dtype, self.device)
        self.matrices.append(weights)
        return weights

    def floats(self, *shape: int) -> Tensor:
        """In float32, whatever the dtype: norms, of which 1 + w would lose most of w in bfloat16, sinks, biases of experts."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def vector(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device)
