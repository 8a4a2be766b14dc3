"""The Kernels protocol by the native operations."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.core.kernels import Weight
from nanoengine.kernels.c_functions import c_functions
from nanoengine.kernels.filters import keep_likeliest
from nanoengine.kernels.gates import ACTIVATIONS
from nanoengine.kernels.interface import ExpertBiases, ExpertWeights, Kernels
from nanoengine.kernels.libraries import load_library
from nanoengine.kernels.memory import keep_freed_memory
from nanoengine.kernels.native_operations import operation
from nanoengine.kernels.native_weights import NativeExperts, NativeWeight


class NativeKernels(Kernels):
    """The native operations. Results are new tensors, except that a residual is overwritten.

    Args:
        exact: do not round activations where they meet quantized weights.
    """

    name = "native"
    capturable = True

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact
        names = ("linear", "gated_linear", "experts", "embed")
        self._linear, self._gated_linear, self._experts, self._embed = map(operation, names)
        (
            self._quantized_linear,
            self._quantized_gated_linear,
            self._quantized_experts,
            self._quantized_embed,
        ) = (operation(f"quantized_{name}") for name in names)
        self._rms_norm, self._gate = operation("rms_norm"), operation("gate")
        self._draw_tokens, self._log_sum_exp = operation("draw_tokens"), operation("log_sum_exp")
        _, self.description, self.fingerprint = load_library()
        c_functions().set_num_threads(torch.get_num_threads())  # as many as torch has, in a team of their own
        instruction = c_functions().quantized_instruction().decode()
        rounded = f"activations in int8, 16 to a scale, by {instruction}, few rows from packed numbers, more from unpacked panels"
        self.quantized_products = "dequantized for float32 products" if exact else rounded
        keep_freed_memory()

    def new_weight(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> NativeWeight:
        assert device.type == "cpu"
        return NativeWeight(outputs, inputs, dtype)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return self._product(x, None, None, 0.0, weight, bias)

    def norm_linear(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self._product(x, residual, norm, eps, weight, bias), x if residual is None else residual

    def gated_linear(self, x: Tensor, weight: Weight, activation: str = "silu") -> Tensor:
        return self._gated_product(x, None, None, 0.0, weight, activation)

    def norm_gated_linear(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Weight, activation: str = "silu"
    ) -> tuple[Tensor, Tensor]:
        return self._gated_product(x, residual, norm, eps, weight, activation), x if residual is None else residual

    def _product(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm: Tensor | None,
        eps: float,
        weight: Weight,
        bias: Tensor | None,
        to_float: bool = False,
    ) -> Tensor:
        assert isinstance(weight, NativeWeight)
        assert x.shape[1] == weight.shape[1]
        outputs = weight.shape[0]
        if weight.is_quantized:
            return self._quantized_linear(x, residual, norm, eps, weight.table, bias, outputs, to_float, self.exact)
        return self._linear(x, residual, norm, eps, weight.numbers, bias, outputs, to_float)

    def _gated_product(
        self, x: Tensor, residual: Tensor | None, norm: Tensor | None, eps: float, weight: Weight, activation: str
    ) -> Tensor:
        assert isinstance(weight, NativeWeight)
        assert x.shape[1] == weight.shape[1]
        if not weight.halves_match:
            return self.gate(self._product(x, residual, norm, eps, weight, None), activation)
        size, number = weight.shape[0] // 2, ACTIVATIONS.index(activation)
        if weight.is_quantized:
            return self._quantized_gated_linear(x, residual, norm, eps, weight.table, size, number, self.exact)
        return self._gated_linear(x, residual, norm, eps, weight.numbers, size, number)

    def gate(self, both: Tensor, activation: str) -> Tensor:
        return self._gate(both, ACTIVATIONS.index(activation))

    def new_experts(
        self, experts: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> NativeExperts:
        assert device.type == "cpu"
        return NativeExperts(experts, outputs, inputs, dtype)

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
        assert isinstance(gate, NativeExperts)
        assert isinstance(up, NativeExperts)
        assert isinstance(down, NativeExperts)
        count, size, _ = gate.shape
        assert gate.shape == up.shape == (count, down.shape[2], x.shape[1])
        matrices = gate.weight, up.weight, down.weight
        around = *(biases or (None,) * 3), chosen, factors, count, size, ACTIVATIONS.index(activation)
        if all(matrix.is_quantized for matrix in matrices):
            return self._quantized_experts(x, *(matrix.table for matrix in matrices), *around, self.exact)
        return self._experts(x, *(matrix.as_numbers() for matrix in matrices), *around)

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        return self._product(hidden, None, None, 0.0, weight, None, to_float=True)

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, NativeWeight)
        if weight.is_quantized:
            return self._quantized_embed(token_ids, weight.table, weight.shape[1], weight.dtype)
        return self._embed(token_ids, weight.numbers, weight.shape[1], weight.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._rms_norm(x, residual, weight, eps), residual

    def draw_tokens(self, logits: Tensor, keys: Tensor, temperature: Tensor) -> Tensor:
        return self._draw_tokens(logits, keys, temperature)

    def keep_likeliest(self, logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
        return keep_likeliest(logits, top_k, top_p, min_p, self._log_sum_exp)
