"""Mixtures of experts to compute, and what they are in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.kernels import operations
from nanoengine.kernels.operations import ExpertBiases, ExpertWeights, Kernels
from tests.kernels.formulas import gated

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""Of results of size 1: gates and the values behind them may be rounded to the dtype on the way."""


@dataclass(frozen=True)
class Mixture:
    """All that `Kernels.experts` is given; weights are [experts, outputs, inputs]."""

    x: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    chosen: Tensor
    factors: Tensor
    activation: str = "silu"
    biases: ExpertBiases | None = None

    def exact(self) -> Tensor:
        """The formula, row by row and choice by choice, in float64."""
        out = torch.zeros(self.x.shape, dtype=torch.float64, device=self.x.device)
        for i, row in enumerate(self.x.double()):
            for expert, factor in zip(self.chosen[i].tolist(), self.factors[i].double(), strict=True):
                of_gate, of_up, of_down = (0.0, 0.0, 0.0) if self.biases is None else (b[expert] for b in self.biases)
                gate, up = self.gate[expert].double() @ row + of_gate, self.up[expert].double() @ row + of_up
                out[i] += factor * (self.down[expert].double() @ gated(gate, up, self.activation) + of_down)
        return out

    def by(self, kernels: Kernels) -> Tensor:
        weights = [experts_of(kernels, values) for values in (self.gate, self.up, self.down)]
        own = operations.Mixture(*weights, self.activation, self.biases)
        return kernels.experts(self.x, own, self.chosen, self.factors)


def experts_of(kernels: Kernels, values: Tensor) -> ExpertWeights:
    """Weights filled with these, the last expert's first."""
    weights = kernels.new_experts(*values.shape, values.dtype, values.device)
    for i in reversed(range(len(values))):
        weights.expert(i).copy_(values[i])
    return weights


def mixture(
    rows: int,
    experts: int,
    per_row: int,
    hidden: int,
    size: int,
    dtype: torch.dtype,
    device: str = "cpu",
    activation: str = "silu",
) -> Mixture:
    """One that is always the same for the same arguments; "clamped" gates, alone, have biases, as in gpt-oss.

    Experts that no row chose are NaN: nobody may look at them.
    """
    generator = torch.Generator().manual_seed(rows + 1000 * experts)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weights = [draw(experts, size, hidden), draw(experts, size, hidden), draw(experts, hidden, size)]
    factors, chosen = (2 * draw(rows, experts)).softmax(-1).topk(per_row)
    unused = [i for i in range(experts) if i not in chosen]
    for values in weights:
        values /= values.shape[2] ** 0.5
        values[unused] = torch.nan
    tensors = draw(rows, hidden).to(dtype), *(values.to(dtype) for values in weights), chosen, factors
    biases = None
    if activation == "clamped":  # large enough that some values are clamped; what the dtype holds, as a checkpoint's
        drawn = (4 * draw(experts, size), 4 * draw(experts, size), draw(experts, hidden))
        biases = ExpertBiases(*(bias.to(dtype).float().to(device) for bias in drawn))
    return Mixture(*(tensor.to(device) for tensor in tensors), activation, biases)


def assert_mixture(result: Tensor, given: Mixture, looser: int = 1) -> None:
    assert result.dtype == given.x.dtype
    size = 8 if given.activation == "clamped" else 1  # of results: gated values are up to 7 * 8
    tolerance = TOLERANCE[result.dtype] * looser * size
    torch.testing.assert_close(result.double(), given.exact(), atol=tolerance, rtol=tolerance)
