"""Norms that are not as in Llama: weights that a checkpoint has less an offset, and no norm at all."""

from __future__ import annotations

from torch import Tensor

from nanoengine.core.kernels import WeightSlot
from nanoengine.core.layers import Linear, RMSNorm
from nanoengine.kernels.operations import Kernels, Norm
from nanoengine.models.layers.factory import Factory
from nanoengine.models.layers.slots import shifted


class OffsetNorm(RMSNorm):
    """RMSNorm whose weights are `offset` more than those of the checkpoint."""

    kernels: Kernels

    def __init__(self, factory: Factory, size: int, eps: float, offset: float):
        super().__init__(factory, size, eps)
        self.offset = offset

    def slot(self) -> WeightSlot:
        return self.weight if self.offset == 0.0 else shifted(self.weight, self.offset)

    def then_linear(
        self, x: Tensor, residual: Tensor | None, linear: Linear, activation: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """A linear layer of `add_and_norm`, and the gate of it if there is an activation, and the sum."""
        norm = Norm(self.weight, self.eps)
        return self.kernels.product(x, linear.weight, linear.bias, norm=norm, residual=residual, activation=activation)


class NoNorm(OffsetNorm):
    """Stands before a part whose input is not normed: the residual is added, and that is all."""

    def __init__(self, factory: Factory):
        super().__init__(factory, 0, 0.0, 0.0)

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = x if residual is None else x + residual
        return residual, residual

    def then_linear(
        self, x: Tensor, residual: Tensor | None, linear: Linear, activation: str | None = None
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.add_and_norm(x, residual)
        return self.kernels.product(x, linear.weight, linear.bias, activation=activation)
