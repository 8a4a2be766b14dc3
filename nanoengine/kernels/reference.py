"""The kernels in plain torch: they run on every device, and they are the oracle that others are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.kernels.gumbel import gumbel_noise
from nanoengine.kernels.interface import Weight


class RowMajor:
    """A weight as one tensor [outputs, inputs]."""

    def __init__(self, outputs: int, inputs: int):
        self.tensor = torch.empty(outputs, inputs)

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def rows(self, first: int, count: int) -> Tensor:
        return self.tensor[first : first + count]


class TorchKernels:
    """Operations of torch, one after the other.

    Args:
        reason: why they were chosen, if not by name.
    """

    name = "torch"

    def __init__(self, reason: str | None = None):
        self.description = f"no native ones: {reason}" if reason else "plain torch operations"

    def new_weight(self, outputs: int, inputs: int) -> RowMajor:
        return RowMajor(outputs, inputs)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, RowMajor)
        return F.linear(x, weight.tensor, bias)

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        return self.linear(hidden, weight, None).float()

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, RowMajor)
        return F.embedding(token_ids, weight.tensor)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

    def gated_linear(self, x: Tensor, weight: Weight) -> Tensor:
        gate, up = self.linear(x, weight, None).chunk(2, dim=-1)
        return F.silu(gate) * up

    def draw_tokens(self, logits: Tensor, keys: Tensor) -> Tensor:
        token_ids = torch.arange(logits.shape[-1], device=logits.device)[None]
        # One row after the other: its noise stays in the cache.
        rows = [(row + gumbel_noise(key[None], token_ids)[0]).argmax() for row, key in zip(logits, keys, strict=True)]
        return torch.stack(rows)
