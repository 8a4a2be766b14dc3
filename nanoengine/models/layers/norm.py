"""Norms that are not as in Llama: weights that a checkpoint has less an offset, and no norm at all."""

from __future__ import annotations

from typing import Any

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
        x, own = self.before(x, residual)
        return self.kernels.product(x, linear.weight, linear.bias, activation=activation, **own)

    def before(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
        """The input of a product that norms it, and the norm and the residual as `Kernels.product` takes them."""
        return x, {"norm": Norm(self.weight, self.eps), "residual": residual}


class NoNorm(OffsetNorm):
    """Stands before a part whose input is not normed: the residual is added, and that is all."""

    def __init__(self, factory: Factory):
        super().__init__(factory, 0, 0.0, 0.0)

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = x if residual is None else x + residual
        return residual, residual

    def before(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
        return self.add_and_norm(x, residual)[0], {"norm": None, "residual": None}
