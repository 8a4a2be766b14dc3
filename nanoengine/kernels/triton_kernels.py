"""The operations of layers on an NVIDIA GPU: products by cuBLAS, or of few rows together with what is around them, the rest by
Triton kernels, and the steps around the model that the device does by itself, so that the host need not wait for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.kernels.interface import ExpertBiases, ExpertWeights, Weight
from nanoengine.kernels.one_by_one import OneByOne
from nanoengine.kernels.torch_kernels import RowMajor, RowMajorExperts
from nanoengine.kernels.triton.activation import gate_and_multiply
from nanoengine.kernels.triton.experts import mixture
from nanoengine.kernels.triton.few_rows import ROWS, product_of_few_rows
from nanoengine.kernels.triton.norm import add_rms_norm, rms_norm
from nanoengine.kernels.triton.place_tokens import place_tokens
from nanoengine.kernels.triton.sampling import choose_tokens
from nanoengine.kernels.triton.tuning import Tuning, load_tuning


class TritonKernels(OneByOne):
    """Nothing here waits for the device, so that all of it can be captured in a CUDA graph.

    Args:
        tuning: what to compute by our own products; what was chosen for this GPU if not given.
    """

    name = "triton"
    description = "Triton kernels and cuBLAS"
    capturable = True

    def __init__(self, tuning: Tuning | None = None) -> None:
        self.tuning = tuning or load_tuning()
        self.place_tokens, self.choose_tokens = place_tokens, choose_tokens
        self.rms_norm, self.add_rms_norm = rms_norm, add_rms_norm

    def new_weight(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> RowMajor:
        return RowMajor(outputs, inputs, dtype, device)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, RowMajor)
        if self._are_few(x):
            return self._product(x, weight, bias=bias)[0]
        return F.linear(x, weight.tensor, bias)

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, RowMajor)
        if self._are_few(hidden):
            return self._product(hidden, weight, out_dtype=torch.float32)[0]
        if hidden.is_cuda and hidden.dtype in (torch.float16, torch.bfloat16):
            # The sums are float32 anyway: rounding them to half precision would make equals of different logits.
            return torch.mm(hidden, weight.tensor.T, out_dtype=torch.float32)
        return F.linear(hidden, weight.tensor).float()

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, RowMajor)
        return F.embedding(token_ids, weight.tensor)

    def gated_linear(self, x: Tensor, weight: Weight, activation: str = "silu") -> Tensor:
        assert isinstance(weight, RowMajor)
        if self._are_few(x):
            return self._product(x, weight, activation=activation)[0]
        return gate_and_multiply(F.linear(x, weight.tensor), activation)

    def norm_linear(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self._are_few(x):
            return self._product(x, weight, bias=bias, residual=residual, norm=norm, eps=eps)
        return super().norm_linear(x, residual, norm, eps, weight, bias)

    def norm_gated_linear(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Weight, activation: str = "silu"
    ) -> tuple[Tensor, Tensor]:
        if self._are_few(x):
            return self._product(x, weight, residual=residual, norm=norm, eps=eps, activation=activation)
        return super().norm_gated_linear(x, residual, norm, eps, weight, activation)

    def new_experts(
        self, experts: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> RowMajorExperts:
        return RowMajorExperts(experts, outputs, inputs, dtype, device)

    def experts(
        self,
        x: Tensor,
        gate: ExpertWeights,
        up: ExpertWeights,
        down: ExpertWeights,
        chosen: Tensor,
        factors: Tensor,
        activation: str = "silu",
        biases: ExpertBiases | None = None,
    ) -> Tensor:
        assert isinstance(gate, RowMajorExperts)
        assert isinstance(up, RowMajorExperts)
        assert isinstance(down, RowMajorExperts)
        return mixture(x, gate.tensor, up.tensor, down.tensor, chosen, factors, activation, biases)

    def _are_few(self, x: Tensor) -> bool:
        """A larger batch is multiplied by cuBLAS: its programs share what they read."""
        return len(x) <= min(self.tuning.most_product_rows, ROWS)

    def _product(self, x: Tensor, weight: Weight, **around: Any) -> tuple[Tensor, Tensor]:
        assert isinstance(weight, RowMajor)
        return product_of_few_rows(x, weight.tensor, dependent=self.tuning.dependent_launch, **around)
