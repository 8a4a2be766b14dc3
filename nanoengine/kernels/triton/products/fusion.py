"""Fusion: what products of few rows compute in one launch with themselves."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoengine.kernels.operations import Norm
from nanoengine.kernels.reference.gates import ACTIVATIONS
from nanoengine.kernels.triton import dependent


class Fusion(NamedTuple):
    """activation(norm(x + residual) W^T + bias) of rows x and a weight W, without the parts that are None.

    Args:
        bias: [outputs]; gates have none.
        norm: of the input, whose weight is [inputs] float32.
        residual: like x; left as it is. It needs a norm.
        activation: by which the first half of the outputs gates the second; without one there are no gates.
        dtype: of the outputs; that of x, if not given.
        launch: see `dependent.py`.
    """

    bias: Tensor | None = None
    norm: Norm | None = None
    residual: Tensor | None = None
    activation: str | None = None
    dtype: torch.dtype | None = None
    launch: int = 0

    @property
    def sets(self) -> int:
        """Rows of the weight for each output: two, if it is gated."""
        return 1 if self.activation is None else 2

    def results(self, x: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
        """Memory for the outputs, [num_rows, outputs], and for x + residual; x itself, if there is no residual.

        Args:
            x: [num_rows, inputs], contiguous.
        """
        assert self.residual is None or (self.residual.is_contiguous() and self.norm is not None)
        assert self.bias is None or self.activation is None
        out = x.new_empty(len(x), outputs, dtype=self.dtype or x.dtype)
        return out, x if self.residual is None else torch.empty_like(x)

    def arguments(self, x: Tensor, out: Tensor, total: Tensor, *weights: Tensor | None) -> tuple[Any, ...]:
        """The first arguments of a kernel: x, residual, weight of the norm, weights, bias, out, total, eps of the norm."""
        norm_weight, eps = self.norm or (None, 0.0)
        return x, self.residual, norm_weight, *weights, self.bias, out, total, eps

    def before(self) -> dict[str, bool]:
        """Constants of a kernel that say what happens to its rows before they are multiplied."""
        return {"ADD": self.residual is not None, "NORM": self.norm is not None}

    def behind(self) -> dict[str, Any]:
        """Constants that say what happens to sums, and how the kernel is launched."""
        return {
            "GATE": self.activation is not None,
            "ACTIVATION": 0 if self.activation is None else ACTIVATIONS.index(self.activation),
            "BIAS": self.bias is not None,
            "LAUNCH": self.launch,
            **dependent.options(self.launch),
        }
