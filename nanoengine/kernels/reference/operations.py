"""The kernels in plain torch: they run on every device, and they are the oracle that others are tested against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.core.kernels import CoreKernels, DenseWeight, Weight
from nanoengine.core.sampling import FilteredLogits
from nanoengine.kernels.operations import Around, Kernels, Mixture, WeightRows
from nanoengine.kernels.quantized.tensor import QuantizedTensor
from nanoengine.kernels.reference.filters import filter_tokens
from nanoengine.kernels.reference.gates import GATES, gated


class RowMajor(DenseWeight):
    """A weight as one tensor [outputs, inputs]; quantized rows are dequantized."""

    def formats(self) -> Mapping[str, int]:
        return {str(self.tensor.dtype).removeprefix("torch."): self.tensor.nbytes}

    def rows(self, first: int, count: int) -> WeightRows:
        return WeightRows(self, first, count)

    def put_numbers(self, first: int, source: Tensor) -> None:
        self.tensor[first : first + len(source)].copy_(source)

    def put_quantized(self, first: int, source: QuantizedTensor) -> None:
        self.put_numbers(first, source.dequantize(self.tensor.dtype))


def dense_matrices(mixture: Mixture) -> list[Tensor]:
    """Gate, up and down of all experts, each [experts, outputs, inputs]."""
    return [part.weight.tensor.view(part.shape) for part in mixture.weights if isinstance(part.weight, RowMajor)]


class TorchKernels(Kernels):
    """Operations of torch, one after the other.

    Args:
        reason: why they were chosen, if not by name.
    """

    quantized_products = "dequantized when they were loaded"

    def __init__(self, reason: str | None = None):
        self.description = reason or CoreKernels.description

    def new_weight(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> RowMajor:
        return RowMajor(outputs, inputs, dtype, device)

    def gate(self, both: Tensor, activation: str) -> Tensor:
        return gated(both, activation)

    def product(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, **around: Unpack[Around]
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(weight, DenseWeight)
        factors, total = self.normed(x, around.get("norm"), around.get("residual"))
        out, activation = F.linear(factors, weight.tensor, bias), around.get("activation")
        out = out if activation is None else gated(out, activation)
        return out.to(around.get("dtype") or x.dtype), total

    def experts(self, x: Tensor, mixture: Mixture, chosen: Tensor, factors: Tensor) -> Tensor:
        gate, up, down = dense_matrices(mixture)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in chosen.unique().tolist():
            tokens, choices = torch.where(chosen == expert)
            rows = x[tokens]
            biases = (None,) * 3 if mixture.biases is None else [bias[expert].to(x.dtype) for bias in mixture.biases]
            of_gate, of_up, of_down = biases
            values = F.linear(rows, gate[expert], of_gate), F.linear(rows, up[expert], of_up)
            results = F.linear(GATES[mixture.activation](*values), down[expert], of_down).float()
            total.index_add_(0, tokens, results * factors[tokens, choices, None])
        return total.to(x.dtype)

    def filter_tokens(self, logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Iterator[FilteredLogits]:
        return filter_tokens(logits, top_k, top_p, min_p, log_sum_exp)


def log_sum_exp(logits: Tensor) -> Tensor:
    """ln(sum of exp(logits)) of each row: [n, count] -> [n]."""
    return logits.logsumexp(-1)
