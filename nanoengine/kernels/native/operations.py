"""The Kernels protocol by the native kernels: C sees addresses and sizes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from types import SimpleNamespace
from typing import Unpack

import torch
from torch import Tensor

from nanoengine.core.kernels import TokenPositions, Weight
from nanoengine.core.sampling import LEAST_TEMPERATURE, FilteredLogits, SamplingTable
from nanoengine.kernels.memory import keep_freed_memory
from nanoengine.kernels.native.addresses import DTYPES, WrongTensor, address, wrong
from nanoengine.kernels.native.c_functions import c_functions
from nanoengine.kernels.native.libraries import load_library
from nanoengine.kernels.native.recurrences import NativeRecurrences
from nanoengine.kernels.native.weights import ROUNDED, NativeWeight, Packer
from nanoengine.kernels.operations import Around, ExpertWeights, Kernels, Mixture, Norm
from nanoengine.kernels.reference.filters import filter_tokens
from nanoengine.kernels.reference.gates import ACTIVATIONS

TABLE_DTYPES = torch.float32, torch.int32, torch.float32, torch.float32, torch.int64
"""Of the columns of a `SamplingTable`."""


class NativeKernels(NativeRecurrences, Kernels):
    """The native kernels as functions of tensors. Results are new tensors, except that a residual is overwritten.

    Args:
        activation_dtype: the precision of activations in products with quantized weights: see `KernelOptions`.
        num_threads: in a separate pool. None: as many as torch has.
        c: functions of a library that was compiled in another way than for this CPU; None: that for this CPU.

    Raises:
        CannotCompile: there is no compiler, or it failed.
    """

    name = "native"
    capturable = True

    def __init__(
        self, *, activation_dtype: str = "auto", num_threads: int | None = None, c: SimpleNamespace | None = None
    ) -> None:
        self.c = c_functions() if c is None else c
        if activation_dtype == "auto":
            activation_dtype = "bfloat16" if self.c.uses_tiles() else "int8"
        self.activation_dtype = activation_dtype
        self.packer = Packer(self.c)
        self._table: SamplingTable | None = None  # whose columns were looked at last
        self._columns: list[int | None] = []
        _, self.description, code = load_library()
        self.fingerprint = code + " with AMX" * self.c.uses_tiles()
        self.c.set_num_threads(num_threads or torch.get_num_threads())
        instruction = self.c.quantized_instruction().decode()
        rounded = (
            f"activations in {activation_dtype}, 16 to a scale, by {instruction}, few rows from packed numbers, "
            "more from unpacked panels"
        )
        is_rounded = activation_dtype in ROUNDED
        self.quantized_products = rounded if is_rounded else f"dequantized for {activation_dtype} products"
        keep_freed_memory()

    # ---- weights

    def new_weight(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> NativeWeight:
        assert device.type == "cpu"
        return NativeWeight(self.packer, outputs, inputs, dtype, activation_dtype=self.activation_dtype)

    # ---- products

    def product(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, **around: Unpack[Around]
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(weight, NativeWeight)
        norm, residual, activation = around.get("norm"), around.get("residual"), around.get("activation")
        (outputs, _), total = weight.shape, x if residual is None else residual
        if activation is not None and not weight.halves_match:
            # Not rounded before the gate, as products are not where halves match.
            both, total = self.product(x, weight, norm=norm, residual=residual, dtype=torch.float32)
            return self.gate(both, activation).to(x.dtype), total
        x = x.contiguous()
        pointers = *normed(x, residual, norm, weight), weight.address
        if activation is None:
            out = x.new_empty(len(x), outputs, dtype=around.get("dtype") or x.dtype)
            added = address(bias, x.dtype, outputs)
            self.c.linear(DTYPES[x.dtype], DTYPES[out.dtype], *pointers, added, out.data_ptr(), len(x))
        else:
            out = x.new_empty(len(x), outputs // 2)
            self.c.gated_linear(DTYPES[x.dtype], ACTIVATIONS.index(activation), *pointers, out.data_ptr(), len(x))
        return out, total

    def gate(self, both: Tensor, activation: str) -> Tensor:
        both = both.contiguous()
        rows, size = both.shape[0], both.shape[1] // 2
        out = both.new_empty(rows, size)
        kinds = DTYPES[both.dtype], ACTIVATIONS.index(activation)
        self.c.gate(*kinds, address(both, both.dtype), out.data_ptr(), rows, size)
        return out

    def experts(self, x: Tensor, mixture: Mixture, chosen: Tensor, factors: Tensor) -> Tensor:
        biases = mixture.biases
        of_gate_and_up, of_down = (None, None) if biases is None else (biases[:2], biases.down)
        gated = self.gate_experts(x, mixture.weights[:2], chosen, mixture.activation, of_gate_and_up)
        return self.add_up_experts(gated, mixture.down, chosen, factors, of_down)

    def gate_experts(
        self,
        x: Tensor,
        weights: Sequence[ExpertWeights],
        chosen: Tensor,
        activation: str,
        biases: Sequence[Tensor] | None,
    ) -> Tensor:
        """The first half of `experts`: what goes into the last products, [num_tokens * k, size], sorted by expert."""
        gate, up = (tensor.weight for tensor in weights if isinstance(tensor.weight, NativeWeight))
        count, size, inputs = weights[0].shape
        assert gate.shape == up.shape
        x, chosen = x.contiguous(), chosen.contiguous()
        gated = x.new_empty(chosen.numel(), size)
        kinds = DTYPES[x.dtype], ACTIVATIONS.index(activation)
        added = (address(bias, torch.float32, count * size) for bias in biases or (None, None))
        pointers = address(x, gate.dtype, len(chosen) * inputs), gate.address, up.address, *added
        offsets = address(chosen, torch.int64), gated.data_ptr()
        if not self.c.gate_experts(*kinds, *pointers, *offsets, *chosen.shape, count):
            raise WrongTensor(f"a choice is none of {count} experts")
        return gated

    def add_up_experts(
        self, gated: Tensor, down: ExpertWeights, chosen: Tensor, factors: Tensor, bias: Tensor | None
    ) -> Tensor:
        """The second half: the products of what `gate_experts` gave, and their sums: [num_tokens, hidden]."""
        weight, (count, hidden, inputs) = down.weight, down.shape
        assert isinstance(weight, NativeWeight)
        chosen, factors = chosen.contiguous(), factors.contiguous()
        out = gated.new_empty(len(chosen), hidden)
        pointers = (
            address(gated, weight.dtype, chosen.numel() * inputs),
            weight.address,
            address(bias, torch.float32, count * hidden),
            address(chosen, torch.int64),
            address(factors, torch.float32, chosen.numel()),
        )
        self.c.add_up_experts(DTYPES[gated.dtype], *pointers, out.data_ptr(), *chosen.shape, count)
        return out

    # ---- everything else

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, NativeWeight)
        token_ids = token_ids.contiguous()
        out = token_ids.new_empty(len(token_ids), weight.shape[1], dtype=weight.dtype)
        pointers = address(token_ids, torch.int64), weight.address
        if not self.c.embed(DTYPES[out.dtype], *pointers, out.data_ptr(), len(token_ids)):
            raise WrongTensor(f"a token id is none of {weight.shape[0]}")
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
    ) -> TokenPositions:
        num_groups, num_rows, _ = tables.shape
        count, kind = len(rows), torch.int32
        if tables.dtype is not kind or not tables.is_cpu or tables.stride(2) != 1:
            raise wrong(tables, "int32 on cpu with tables in one piece")
        tokens = token_ids.new_empty(2 + num_groups, len(token_ids), dtype=torch.int64)
        seq_lens = token_ids.new_empty(count)
        runs = address(rows, kind), address(query_start_loc, kind, count + 1), address(num_computed, kind, count)
        pointers = address(token_ids, kind), *runs, address(last_tokens, torch.int64, num_rows), tables.data_ptr()
        sizes = *tables.stride()[:2], num_groups, num_rows, count, len(token_ids), block_size
        slots_of_tokens = TokenPositions(tokens[0], tokens[1], tokens[2:], seq_lens)
        if not self.c.compute_slot_mapping(*pointers, *sizes, *(tensor.data_ptr() for tensor in slots_of_tokens)):
            raise WrongTensor(f"a row is none of {num_rows}, or a token stands outside of its {tables.shape[2]} blocks")
        return slots_of_tokens

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._rms_norm(x, residual, weight, eps), residual

    def _rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, size = torch.empty_like(x), x.shape[-1]
        added = address(residual, x.dtype, x.numel()), address(weight, torch.float32, size)
        inputs = address(x, x.dtype), *added
        self.c.rms_norm(DTYPES[x.dtype], *inputs, out.data_ptr(), x.numel() // size, size, eps)
        return out

    def choose_tokens(
        self, logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor, last_tokens: Tensor | None = None
    ) -> Tensor:
        logits, offsets = logits.contiguous(), positions.to(torch.int32)
        tokens = logits.new_empty(len(logits), dtype=torch.int64)
        if self._table is not table:  # those of an engine stay where they are
            columns = table.temperature, table.top_k, table.top_p, table.min_p, table.seeds
            self._columns = [*map(address, columns, TABLE_DTYPES, repeat(len(table.seeds)))]
            self._table = table
        indices = address(rows, torch.int32, len(logits)), address(offsets, torch.int32, len(logits))
        pointers = address(logits, torch.float32), *indices, *self._columns
        outputs = LEAST_TEMPERATURE, tokens.data_ptr(), address(last_tokens, torch.int64, len(table.seeds))
        if self.c.choose_tokens(*pointers, *outputs, *logits.shape):
            return tokens
        return super().choose_tokens(logits, table, rows, positions, last_tokens)

    def draw_tokens(self, logits: Tensor, keys: Tensor, temperature: Tensor) -> Tensor:
        logits, keys, temperature = logits.contiguous(), keys.contiguous(), temperature.contiguous()
        tokens = torch.empty_like(keys)
        indices = address(keys, torch.int64, len(logits)), address(temperature, torch.float32, len(logits))
        self.c.draw_tokens(address(logits, torch.float32), *indices, tokens.data_ptr(), *logits.shape)
        return tokens

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """[n, count] -> [n]: ln(sum of exp(logit))."""
        logits = logits.contiguous()
        out = logits.new_empty(len(logits))
        self.c.log_sum_exp(address(logits, torch.float32), out.data_ptr(), *logits.shape)
        return out

    def filter_tokens(self, logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Iterator[FilteredLogits]:
        return filter_tokens(logits, top_k, top_p, min_p, self.log_sum_exp)


def normed(
    x: Tensor, residual: Tensor | None, norm: Norm | None, weight: NativeWeight
) -> tuple[int | None, int | None, int | None, float]:
    """What a product takes, before the weight: its input in one piece, and how that is normed."""
    inputs, kind = weight.shape[1], weight.dtype
    size, (factors, eps) = len(x) * inputs, norm or (None, 0.0)
    return address(x, kind, size), address(residual, kind, size), address(factors, torch.float32, inputs), eps
