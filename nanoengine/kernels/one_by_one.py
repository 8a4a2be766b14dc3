"""The operations that may be one kernel, one after the other: for kernels that do not join them."""

from __future__ import annotations

from torch import Tensor

from nanoengine.kernels.interface import Kernels, Weight


class OneByOne:
    """Adds to kernels what is made of their other operations."""

    def norm_linear(
        self: Kernels, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        normed, residual = _norm(self, x, residual, norm, eps)
        return self.linear(normed, weight, bias), residual

    def norm_gated_linear(
        self: Kernels,
        x: Tensor,
        residual: Tensor | None,
        norm: Tensor,
        eps: float,
        weight: Weight,
        activation: str = "silu",
    ) -> tuple[Tensor, Tensor]:
        normed, residual = _norm(self, x, residual, norm, eps)
        return self.gated_linear(normed, weight, activation), residual


def _norm(kernels: Kernels, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if residual is None:
        return kernels.rms_norm(x, norm, eps), x
    return kernels.add_rms_norm(x, residual, norm, eps)
