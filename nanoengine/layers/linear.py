"""Linear: y = x W^T + b, with a weight that a checkpoint is loaded straight into."""

from __future__ import annotations

from torch import Tensor

from nanoengine.kernels.interface import Destination
from nanoengine.layers.factory import Factory
from nanoengine.layers.norm import RMSNorm


class Linear:
    """A linear layer whose output may be several projections of the same input, side by side.

    The projections are rows of one weight, so that they cost one product: `parts()` are the places that the separate
    tensors of a checkpoint are copied into.

    Args:
        factory: makes the weight.
        in_features: width of the input.
        out_features: width of each projection.
        bias: whether there is one.
    """

    def __init__(self, factory: Factory, in_features: int, *out_features: int, bias: bool = False):
        self.kernels = factory.kernels
        self.out_features = out_features
        self.weight = factory.weight(sum(out_features), in_features)
        self.bias = factory.vector(sum(out_features)) if bias else None

    def __call__(self, x: Tensor) -> Tensor:  # [num_tokens, in_features] -> [num_tokens, sum(out_features)]
        return self.kernels.linear(x, self.weight, self.bias)

    def after_norm(self, norm: RMSNorm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of the norm of the next residual, and that residual: x + residual, or x if there is none yet.

        The residual that is given may be overwritten. Without a norm, of the residual itself.
        """
        if norm is None:
            residual = x if residual is None else x + residual
            return self(residual), residual
        return self.kernels.norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias)

    def gated_after_norm(
        self, norm: RMSNorm | None, x: Tensor, residual: Tensor | None, activation: str
    ) -> tuple[Tensor, Tensor]:
        """The second of two projections of like width, gated by the first (`gates.py`), in the same way: [num_tokens, width]."""
        if self.bias is not None:
            both, residual = self.after_norm(norm, x, residual)
            return self.kernels.gate(both, activation), residual
        if norm is None:
            residual = x if residual is None else x + residual
            return self.kernels.gated_linear(residual, self.weight, activation), residual
        return self.kernels.norm_gated_linear(x, residual, norm.weight, norm.eps, self.weight, activation)

    def parts(self, prefix: str, *names: str) -> dict[str, Destination]:
        """Checkpoint name -> place of its rows, for projections that a checkpoint calls `prefix.name`; one name has them all."""
        places: dict[str, Destination] = {}
        first = 0
        counts = self.out_features if len(names) > 1 else (sum(self.out_features),)
        for name, count in zip(names, counts, strict=True):
            places[f"{prefix}.{name}.weight"] = self.weight.rows(first, count)
            if self.bias is not None:
                places[f"{prefix}.{name}.bias"] = self.bias[first : first + count]
            first += count
        return places
