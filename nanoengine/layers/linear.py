"""Linear: y = x W^T + b, with parameters that a checkpoint is loaded straight into."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """A linear layer whose output may be several projections of the same input, side by side.

    The projections are rows of one weight, so that they cost one product: `parts()` are the views that the separate
    tensors of a checkpoint are copied into.

    Args:
        in_features: width of the input.
        out_features: width of each projection.
        bias: whether there is one.
    """

    def __init__(self, in_features: int, *out_features: int, bias: bool = False):
        super().__init__()
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(sum(out_features), in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(out_features)), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:  # [num_tokens, in_features] -> [num_tokens, sum(out_features)]
        return F.linear(x, self.weight, self.bias)

    def parts(self, prefix: str, *names: str) -> dict[str, Tensor]:
        """Checkpoint name -> view of its rows, for projections that a checkpoint calls `prefix.name`."""
        views = {}
        for name, weight in zip(names, self.weight.split(self.out_features), strict=True):
            views[f"{prefix}.{name}.weight"] = weight
        if self.bias is not None:
            for name, bias in zip(names, self.bias.split(self.out_features), strict=True):
                views[f"{prefix}.{name}.bias"] = bias
        return views
