"""The kernels in plain torch: they run on every device, and they are the oracle that others are tested against."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.kernels.gates import GATES, gated
from nanoengine.kernels.gumbel import gumbel_noise
from nanoengine.kernels.interface import ExpertBiases, ExpertWeights, PlacedTokens, Weight
from nanoengine.kernels.one_by_one import OneByOne
from nanoengine.kernels.sampling import NONE_LEFT, NOT_FINITE, SamplingTable, choose_tokens
from nanoengine.quantization.tensor import QuantizedTensor


class Numbers:
    """A place for rows in a tensor; quantized ones are computed with as the numbers that they stand for."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.shape = tensor, tensor.shape

    def copy_(self, source: Tensor) -> None:
        self.tensor.copy_(source)

    def copy_quantized(self, source: QuantizedTensor) -> None:
        self.tensor.copy_(source.dequantize(self.tensor.dtype))


def bytes_by_dtype(tensor: Tensor) -> dict[str, int]:
    return {str(tensor.dtype).removeprefix("torch."): tensor.nbytes}


class RowMajor:
    """A weight as one tensor [outputs, inputs]."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device):
        self.tensor = torch.empty(outputs, inputs, dtype=dtype, device=device)

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def formats(self) -> Mapping[str, int]:
        return bytes_by_dtype(self.tensor)

    def rows(self, first: int, count: int) -> Numbers:
        return Numbers(self.tensor[first : first + count])


class RowMajorExperts:
    """The weights of experts as one tensor [experts, outputs, inputs]."""

    def __init__(self, experts: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device):
        self.tensor = torch.empty(experts, outputs, inputs, dtype=dtype, device=device)

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def formats(self) -> Mapping[str, int]:
        return bytes_by_dtype(self.tensor)

    def expert(self, index: int) -> Numbers:
        return Numbers(self.tensor[index])


class TorchKernels(OneByOne):
    """Operations of torch, one after the other.

    Args:
        reason: why they were chosen, if not by name.
    """

    name = "torch"
    quantized_products = "dequantized when they were loaded"
    fingerprint = str(torch.__version__)
    capturable = False

    def __init__(self, reason: str | None = None):
        self.description = reason or "plain torch operations"
        self.place_tokens = place_tokens

    def new_weight(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> RowMajor:
        return RowMajor(outputs, inputs, dtype, device)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, RowMajor)
        return F.linear(x, weight.tensor, bias)

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        return self.linear(hidden, weight, None).float()

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, RowMajor)
        return F.embedding(token_ids, weight.tensor)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

    def gate(self, both: Tensor, activation: str) -> Tensor:
        return gated(both, activation)

    def gated_linear(self, x: Tensor, weight: Weight, activation: str = "silu") -> Tensor:
        return gated(self.linear(x, weight, None), activation)

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
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in chosen.unique().tolist():
            tokens, choices = torch.where(chosen == expert)
            rows = x[tokens]
            of_gate, of_up, of_down = (None,) * 3 if biases is None else (bias[expert].to(x.dtype) for bias in biases)
            values = F.linear(rows, gate.tensor[expert], of_gate), F.linear(rows, up.tensor[expert], of_up)
            results = F.linear(GATES[activation](*values), down.tensor[expert], of_down).float()
            total.index_add_(0, tokens, results * factors[tokens, choices, None])
        return total.to(x.dtype)

    def choose_tokens(
        self, logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor, last_tokens: Tensor | None = None
    ) -> Tensor:
        return choose_tokens(draw_tokens, log_sum_exp, logits, table, rows, positions, last_tokens)


def place_tokens(
    token_ids: Tensor,
    rows: Tensor,
    query_start_loc: Tensor,
    num_computed: Tensor,
    last_tokens: Tensor,
    tables: Tensor,
    block_size: int,
    max_query_len: int,
) -> PlacedTokens:
    """`Kernels.place_tokens`."""
    is_padding = rows == tables.shape[1] - 1
    rows, positions = rows.long(), num_computed.long()
    if max_query_len == 1:
        seq_lens, padding = num_computed + 1, is_padding
    else:
        query_lens = query_start_loc.diff()
        seq_lens = num_computed + query_lens
        is_of = torch.repeat_interleave(query_lens, output_size=len(token_ids))  # [num_tokens]: index of the sequence
        rows, padding = rows[is_of], is_padding[is_of]
        positions = torch.arange(len(token_ids), device=rows.device) + (positions - query_start_loc[:-1])[is_of]
    blocks = tables[:, rows, positions // block_size].long()  # slots of a large pool need more than 32 bits
    slots = torch.where(padding, -1, blocks * block_size + positions % block_size)
    input_ids = torch.where(token_ids < 0, last_tokens.index_select(0, rows).clamp_(min=0), token_ids)
    return PlacedTokens(input_ids, positions, slots, seq_lens.masked_fill_(is_padding, 0))


def draw_tokens(logits: Tensor, keys: Tensor, temperature: Tensor) -> Tensor:
    """A `Draw`."""
    token_ids = torch.arange(logits.shape[-1], device=logits.device)[None]
    tokens = logits.argmax(-1)
    highest = logits.gather(-1, tokens[:, None])[:, 0]
    for row in (temperature > 0).nonzero()[:, 0]:  # one after the other: its noise stays in the cache
        tokens[row] = (logits[row] / temperature[row] + gumbel_noise(keys[row][None], token_ids)[0]).argmax()
    tokens.masked_fill_(highest.isfinite().logical_not_(), NOT_FINITE)
    return tokens.masked_fill_(highest == -torch.inf, NONE_LEFT)


def log_sum_exp(logits: Tensor) -> Tensor:
    """ln(sum of exp(logits)) of each row: [n, count] -> [n]."""
    return logits.logsumexp(-1)
