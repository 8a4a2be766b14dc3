"""RMSNorm (Zhang and Sennrich, 2019), alone or together with the residual addition before it."""

from __future__ import annotations

from torch import Tensor

from nanoengine.kernels.interface import Destination
from nanoengine.layers.factory import Factory
from nanoengine.layers.shifted import Shifted


class RMSNorm:
    """x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, factory: Factory, size: int, eps: float):
        self.eps = eps
        self.kernels = factory.kernels
        self.weight = factory.floats(size)

    def place(self, offset: float = 0.0) -> Destination:
        """Of the weight, to be filled from a checkpoint whose weights are `offset` less."""
        return self.weight if offset == 0.0 else Shifted(self.weight, offset)

    def __call__(self, x: Tensor) -> Tensor:  # [..., size] -> the same
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of the next residual, and that residual: (norm(x + residual), x + residual).

        The residual that is given may be overwritten.
        """
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)
