"""The Kernels protocol by the native kernels: C sees addresses and sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from nanoengine.core.kernels import PlacedTokens, Weight
from nanoengine.core.sampling import LEAST_TEMPERATURE, SamplingTable
from nanoengine.kernels.addresses import DTYPES, address, address_of_floats
from nanoengine.kernels.c_functions import c_functions
from nanoengine.kernels.filters import keep_likeliest
from nanoengine.kernels.gates import ACTIVATIONS
from nanoengine.kernels.interface import ExpertBiases, ExpertWeights, Kernels
from nanoengine.kernels.libraries import load_library
from nanoengine.kernels.memory import keep_freed_memory
from nanoengine.kernels.native_recurrences import NativeRecurrences
from nanoengine.kernels.native_weights import NativeExperts, NativeWeight, Packer


class NativeKernels(NativeRecurrences, Kernels):
    """The native kernels as functions of tensors. Results are new tensors, except that a residual is overwritten.

    Args:
        activation_dtype: what activations are rounded to where they meet quantized weights: see `KernelOptions`.
        c: functions of a library that was compiled in another way than for this CPU; None: that for this CPU.

    Raises:
        CannotCompile: there is no compiler, or it failed.
    """

    name = "native"
    capturable = True

    def __init__(self, *, activation_dtype: str = "int8", c: SimpleNamespace | None = None) -> None:
        self.c, self.activation_dtype = c_functions() if c is None else c, activation_dtype
        self.packer = Packer(self.c)
        _, self.description, self.fingerprint = load_library()
        self.c.set_num_threads(torch.get_num_threads())  # as many as torch has, in a team of their own
        instruction = self.c.quantized_instruction().decode()
        rounded = (
            f"activations in {activation_dtype}, 16 to a scale, by {instruction}, few rows from packed numbers, "
            "more from unpacked panels"
        )
        exact = activation_dtype == "float32"
        self.quantized_products = "dequantized for float32 products" if exact else rounded
        keep_freed_memory()

    # ---- weights

    def new_weight(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> NativeWeight:
        assert device.type == "cpu"
        return NativeWeight(self.packer, outputs, inputs, dtype, activation_dtype=self.activation_dtype)

    def new_experts(
        self, experts: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> NativeExperts:
        assert device.type == "cpu"
        return NativeExperts(self.packer, experts, outputs, inputs, dtype, activation_dtype=self.activation_dtype)

    # ---- products

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return self._product(x, None, None, 0.0, weight, bias, x.dtype)

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        return self._product(hidden, None, None, 0.0, weight, None, torch.float32)

    def norm_linear(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self._product(x, residual, norm, eps, weight, bias, x.dtype), x if residual is None else residual

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
        dtype: torch.dtype,
    ) -> Tensor:
        assert isinstance(weight, NativeWeight)
        assert x.shape[1] == weight.shape[1]
        x = x.contiguous()
        out = torch.empty(len(x), weight.shape[0], dtype=dtype)
        normed = x.data_ptr(), address(residual), address_of_floats(norm), eps
        outputs = weight.address, address(bias), out.data_ptr()
        self.c.linear(DTYPES[x.dtype], DTYPES[dtype], *normed, *outputs, len(x))
        return out

    def _gated_product(
        self, x: Tensor, residual: Tensor | None, norm: Tensor | None, eps: float, weight: Weight, activation: str
    ) -> Tensor:
        assert isinstance(weight, NativeWeight)
        assert x.shape[1] == weight.shape[1]
        if not weight.halves_match:  # not rounded before the gate, as they are not where halves match
            both = self._product(x, residual, norm, eps, weight, None, torch.float32)
            return self.gate(both, activation).to(x.dtype)
        x = x.contiguous()
        out = torch.empty(len(x), weight.shape[0] // 2, dtype=x.dtype)
        normed = x.data_ptr(), address(residual), address_of_floats(norm), eps
        kinds = DTYPES[x.dtype], ACTIVATIONS.index(activation)
        self.c.gated_linear(*kinds, *normed, weight.address, out.data_ptr(), len(x))
        return out

    def gate(self, both: Tensor, activation: str) -> Tensor:
        both = both.contiguous()
        rows, size = both.shape[0], both.shape[1] // 2
        out = torch.empty(rows, size, dtype=both.dtype)
        kinds = DTYPES[both.dtype], ACTIVATIONS.index(activation)
        self.c.gate(*kinds, both.data_ptr(), out.data_ptr(), rows, size)
        return out

    def experts(
        self,
        x: Tensor,
        weights: Sequence[ExpertWeights],
        chosen: Tensor,
        factors: Tensor,
        activation: str = "silu",
        biases: ExpertBiases | None = None,
    ) -> Tensor:
        gate, up, down = weights
        of_gate_and_up, of_down = (None, None) if biases is None else (biases[:2], biases.down)
        gated = self.gate_experts(x, (gate, up), chosen, activation, of_gate_and_up)
        return self.add_up_experts(gated, down, chosen, factors, of_down)

    def gate_experts(
        self,
        x: Tensor,
        weights: Sequence[ExpertWeights],
        chosen: Tensor,
        activation: str,
        biases: Sequence[Tensor] | None,
    ) -> Tensor:
        """The first half of `experts`: what goes into the last products, [num_tokens * k, size], sorted by expert."""
        gate, up = (own for own in weights if isinstance(own, NativeExperts))
        count, size, inputs = gate.shape
        assert gate.shape == up.shape
        assert x.shape[1] == inputs
        x, chosen = x.contiguous(), chosen.contiguous()
        gated = torch.empty(chosen.numel(), size, dtype=x.dtype)
        kinds = DTYPES[x.dtype], ACTIVATIONS.index(activation)
        added = map(address_of_floats, biases or (None, None))
        inputs_and_matrices = x.data_ptr(), gate.weight.address, up.weight.address, *added, chosen.data_ptr()
        are_experts = self.c.gate_experts(*kinds, *inputs_and_matrices, gated.data_ptr(), *chosen.shape, count)
        assert are_experts, f"a choice is none of {count} experts"
        return gated

    def add_up_experts(
        self, gated: Tensor, down: ExpertWeights, chosen: Tensor, factors: Tensor, bias: Tensor | None
    ) -> Tensor:
        """The second half: the products of what `gate_experts` gave, and their sums: [num_tokens, hidden]."""
        assert isinstance(down, NativeExperts)
        count, hidden, inputs = down.shape
        assert gated.shape == (chosen.numel(), inputs)
        chosen, factors = chosen.contiguous(), factors.contiguous()
        out = torch.empty(len(chosen), hidden, dtype=gated.dtype)
        given = (
            gated.data_ptr(),
            down.weight.address,
            address_of_floats(bias),
            chosen.data_ptr(),
            address_of_floats(factors),
        )
        self.c.add_up_experts(DTYPES[gated.dtype], *given, out.data_ptr(), *chosen.shape, count)
        return out

    # ---- everything else

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, NativeWeight)
        token_ids = token_ids.contiguous()
        out = torch.empty(len(token_ids), weight.shape[1], dtype=weight.dtype)
        self.c.embed(DTYPES[out.dtype], token_ids.data_ptr(), weight.address, out.data_ptr(), len(token_ids))
        return out

    def compute_slot_mapping(
        self,
        token_ids: Tensor,
        rows: Tensor,
        query_start_loc: Tensor,
        num_computed: Tensor,
        last_tokens: Tensor,
        tables: Tensor,
        block_size: int,
        max_query_len: int,
    ) -> PlacedTokens:
        num_groups, num_rows, _ = tables.shape
        assert tables.stride(2) == 1
        tokens = torch.empty(2 + num_groups, len(token_ids), dtype=torch.int64)
        seq_lens = torch.empty(len(rows), dtype=torch.int32)
        given = *map(address, (token_ids, rows, query_start_loc, num_computed, last_tokens)), tables.data_ptr()
        sizes = *tables.stride()[:2], num_groups, num_rows, len(rows), len(token_ids), block_size
        self.c.compute_slot_mapping(*given, *sizes, *map(address, (*tokens[:2], tokens[2:], seq_lens)))
        return PlacedTokens(tokens[0], tokens[1], tokens[2:], seq_lens)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._rms_norm(x, residual, weight, eps), residual

    def _rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, size = torch.empty_like(x), x.shape[-1]
        inputs = x.data_ptr(), address(residual), address_of_floats(weight)
        self.c.rms_norm(DTYPES[x.dtype], *inputs, out.data_ptr(), x.numel() // size, size, eps)
        return out

    def choose_tokens(
        self, logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor, last_tokens: Tensor | None = None
    ) -> Tensor:
        logits, places = logits.contiguous(), positions.to(torch.int32)
        tokens = torch.empty(len(logits), dtype=torch.int64)
        columns = table.temperature, table.top_k, table.top_p, table.min_p, table.seeds
        given = map(address, (logits, rows, places, *columns))
        outputs = LEAST_TEMPERATURE, tokens.data_ptr(), address(last_tokens)
        if self.c.choose_tokens(*given, *outputs, *logits.shape):
            return tokens
        return super().choose_tokens(logits, table, rows, positions, last_tokens)

    def draw_tokens(self, logits: Tensor, keys: Tensor, temperature: Tensor) -> Tensor:
        logits, keys, temperature = logits.contiguous(), keys.contiguous(), temperature.contiguous()
        tokens = torch.empty_like(keys)
        inputs = logits.data_ptr(), keys.data_ptr(), address_of_floats(temperature)
        self.c.draw_tokens(*inputs, tokens.data_ptr(), *logits.shape)
        return tokens

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """[n, count] -> [n]: ln(sum of exp(logit))."""
        logits = logits.contiguous()
        out = torch.empty(len(logits))
        self.c.log_sum_exp(logits.data_ptr(), out.data_ptr(), *logits.shape)
        return out

    def keep_likeliest(self, logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
        return keep_likeliest(logits, top_k, top_p, min_p, self.log_sum_exp)
