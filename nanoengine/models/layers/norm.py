"""Norms unlike Llama's: weights stored with an offset, and no norm at all."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nanoengine.core.kernels import WeightSlot
from nanoengine.core.layers import Linear, RMSNorm
from nanoengine.kernels.operations import Kernels, Norm
from nanoengine.models.layers.factory import Factory
from nanoengine.models.layers.slots import shifted
from nanoengine.models.model_config import ModelConfig


class OffsetNorm(RMSNorm):
    """RMSNorm whose weights are `norm_offset` more than those of the checkpoint.

    Args:
        size: of the normed vectors. None: the hidden size.
    """

    kernels: Kernels

    def __init__(self, factory: Factory, config: ModelConfig, size: int | None = None):
        super().__init__(factory, config.hidden_size if size is None else size, config.rms_norm_eps)
        self.offset = config.norm_offset

    def slot(self) -> WeightSlot:
        return self.weight if self.offset == 0.0 else shifted(self.weight, self.offset)

    def then_linear(
        self, x: Tensor, residual: Tensor | None, linear: Linear, activation: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """The linear layer of the norm of x + residual, gated if there is an activation; and the sum."""
        x, fused_norm = self.before(x, residual)
        return self.kernels.product(x, linear.weight, linear.bias, activation=activation, **fused_norm)

    def before(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
        """The input of a product with a fused norm, and the arguments `norm` and `residual` of `Kernels.product`."""
        return x, {"norm": Norm(self.weight, self.eps), "residual": residual}


class NoNorm(OffsetNorm):
    """The norm of a part without one: it adds the residual only."""

    def __init__(self, factory: Factory):
        RMSNorm.__init__(self, factory, 0, 0.0)

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = x if residual is None else x + residual
        return residual, residual

    def before(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
        return self.add_and_norm(x, residual)[0], {"norm": None, "residual": None}
