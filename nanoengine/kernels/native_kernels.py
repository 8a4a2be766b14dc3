"""The Kernels protocol by the native operations; NativeKernels' weights lie as linear.cpp reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.kernels.c_functions import c_functions
from nanoengine.kernels.gates import ACTIVATIONS, gated
from nanoengine.kernels.interface import ExpertBiases, ExpertWeights, Weight
from nanoengine.kernels.libraries import load_libraries
from nanoengine.kernels.memory import keep_freed_memory, zeros_in_huge_pages
from nanoengine.kernels.native_operations import DTYPES, operation
from nanoengine.kernels.sampling import SamplingTable, choose_tokens
from nanoengine.kernels.torch_kernels import place_tokens
from nanoengine.quantization.tensor import QuantizedTensor

PANEL = 32
"""A multiple of the outputs that lie together, for any CPU (linear.cpp)."""


class Packed:
    """A weight in the order in which `linear` reads it (linear.cpp), filled row by row from a checkpoint."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype):
        self.shape = torch.Size((outputs, inputs))
        self.dtype = dtype
        self.dwords = zeros_in_huge_pages([c_functions().packed_size(DTYPES[dtype], outputs, inputs)], torch.int32)

    def rows(self, first: int, count: int) -> PackedRows:
        assert first + count <= self.shape[0]
        return PackedRows(self.dwords, self.dtype, first, count, self.shape[1])


class PackedExperts:
    """The weights of experts, each packed for itself, one behind the other."""

    def __init__(self, experts: int, outputs: int, inputs: int, dtype: torch.dtype):
        self.shape = torch.Size((experts, outputs, inputs))
        self.dtype = dtype
        size = c_functions().packed_size(DTYPES[dtype], outputs, inputs)
        self.dwords = zeros_in_huge_pages([experts, size], torch.int32)

    def expert(self, index: int) -> PackedRows:
        return PackedRows(self.dwords[index], self.dtype, 0, *self.shape[1:])


class PackedRows:
    """Rows [first, first + count) of a packed weight: `copy_` packs what it is given."""

    def __init__(self, dwords: Tensor, dtype: torch.dtype, first: int, count: int, inputs: int):
        self.dwords, self.dtype, self.first = dwords, dtype, first
        self.shape = torch.Size((count, inputs))

    def copy_(self, source: Tensor) -> None:
        assert source.shape == self.shape
        source = source.to(self.dtype).contiguous()
        addresses = source.data_ptr(), self.dwords.data_ptr()
        c_functions().pack(DTYPES[source.dtype], *addresses, self.first, *self.shape)

    def copy_quantized(self, source: QuantizedTensor) -> None:
        self.copy_(source.dequantize(self.dtype))


class NativeKernels:
    """The native operations. Results are new tensors, except that a residual is overwritten."""

    name = "native"
    capturable = False

    def __init__(self) -> None:
        names = ("linear", "gated_linear", "experts", "embed", "rms_norm", "draw_tokens")
        self._linear, self._gated_linear, self._experts, self._embed, self._rms_norm, self._draw_tokens = map(
            operation, names
        )
        self.description = load_libraries().description
        keep_freed_memory()
        self.place_tokens = place_tokens

    def new_weight(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Packed:
        assert device.type == "cpu"
        return Packed(outputs, inputs, dtype)

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
        assert isinstance(weight, Packed)
        assert x.shape[1] == weight.shape[1]
        return self._linear(x, residual, norm, eps, weight.dwords, bias, weight.shape[0], to_float)

    def _gated_product(
        self, x: Tensor, residual: Tensor | None, norm: Tensor | None, eps: float, weight: Weight, activation: str
    ) -> Tensor:
        assert isinstance(weight, Packed)
        assert x.shape[1] == weight.shape[1]
        size = weight.shape[0] // 2
        if size % PANEL:  # the halves share a panel
            return gated(self._product(x, residual, norm, eps, weight, None), activation)
        return self._gated_linear(x, residual, norm, eps, weight.dwords, size, ACTIVATIONS.index(activation))

    def new_experts(
        self, experts: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> PackedExperts:
        assert device.type == "cpu"
        return PackedExperts(experts, outputs, inputs, dtype)

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
        assert isinstance(gate, PackedExperts)
        assert isinstance(up, PackedExperts)
        assert isinstance(down, PackedExperts)
        assert gate.shape == up.shape == (len(down.dwords), down.shape[2], x.shape[1])
        weights = gate.dwords, up.dwords, down.dwords
        number = ACTIVATIONS.index(activation)
        return self._experts(x, *weights, *(biases or (None,) * 3), chosen, factors, gate.shape[1], number)

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        return self._product(hidden, None, None, 0.0, weight, None, to_float=True)

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, Packed)
        return self._embed(token_ids, weight.dwords, weight.shape[1], weight.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._rms_norm(x, residual, weight, eps), residual

    def choose_tokens(
        self, logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor, last_tokens: Tensor | None = None
    ) -> Tensor:
        return choose_tokens(self._draw_tokens, logits, table, rows, positions, last_tokens)
