"""Kernels: the operations of layers. The class here computes them in plain torch; subclasses are faster."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.core import sampling
from nanoengine.core.sampling import SamplingTable


class WeightSlot(Protocol):
    """Target of a tensor of a checkpoint; a tensor is one."""

    @property
    def shape(self) -> torch.Size: ...
    def copy_(self, source: Tensor, /) -> object: ...


class Weight(Protocol):
    """A matrix [outputs, inputs] in the memory layout of its kernels. `rows` are filled from a checkpoint."""

    @property
    def shape(self) -> torch.Size: ...
    def rows(self, first: int, count: int) -> WeightSlot: ...


class DenseWeight:
    """A weight as one tensor [outputs, inputs]."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device):
        self.tensor = torch.empty(outputs, inputs, dtype=dtype, device=device)
        self.shape = self.tensor.shape

    def rows(self, first: int, count: int) -> WeightSlot:
        return self.tensor[first : first + count]


class TokenPositions(NamedTuple):
    """The new tokens of a step, with their positions and slots."""

    input_ids: Tensor  # [num_tokens] int64, as positions
    positions: Tensor
    slot_mapping: Tensor  # [num_groups, num_tokens] int64: a slot in each KV group; -1: nowhere
    seq_lens: Tensor  # [num_seqs] int32: with the new tokens


class CoreKernels:
    """The operations in plain torch, on rows of tokens, in the dtype of the input. A residual argument may be overwritten."""

    name = "torch"
    description = "plain torch operations"
    fingerprint = str(torch.__version__)
    """Identifies the code of the kernels: other code may compute K/V with other bits."""
    capturable = False
    """Whether a CUDA graph can record them: they never wait for the device, and launch the same whatever it holds."""
    draw_tokens = staticmethod(sampling.draw_tokens)
    filter_tokens = staticmethod(sampling.filter_tokens)

    def new_weight(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Weight:
        """A matrix with unset rows."""
        return DenseWeight(outputs, inputs, dtype, device)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """x W^T + bias: [num_tokens, inputs] -> [num_tokens, outputs]."""
        assert isinstance(weight, DenseWeight)
        return F.linear(x, weight.tensor, bias)

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        """hidden W^T in float32: [num_tokens, inputs] -> [num_tokens, outputs]."""
        return self.linear(hidden, weight, None).float()

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        """Rows of a weight: [num_tokens] -> [num_tokens, inputs]."""
        assert isinstance(weight, DenseWeight)
        return F.embedding(token_ids, weight.tensor)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension, computed in float32."""
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

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
        """Positions and slots of the new tokens: slot = table[position // block_size] * block_size + position % block_size.

        The last row of `last_tokens`, and of each group of `tables`, is for padding: length 0, no slots, all at position 0.

        Args:
            token_ids: [num_tokens] int32; -1 stands for the last token of the sequence's row.
            rows: [num_seqs] int32, the row of each sequence in `last_tokens` and `tables`.
            query_start_loc: [num_seqs + 1] int32, where the tokens of each sequence begin.
            num_computed: [num_seqs] int32, tokens before them; 0 for padding.
            last_tokens: [num_rows] int64.
            tables: [num_groups, num_rows, width] int32: the block tables of each KV group.
            max_query_len: most new tokens of a sequence.
        """
        is_padding = rows == tables.shape[1] - 1
        rows, positions = rows.long(), num_computed.long()
        if max_query_len == 1:
            seq_lens, padding = num_computed + 1, is_padding
        else:
            seq_lens = num_computed + (query_lens := query_start_loc.diff())
            is_of = torch.repeat_interleave(query_lens, output_size=len(token_ids))  # the sequence of each token
            at = torch.arange(len(token_ids), dtype=torch.int64, device=rows.device)
            rows, padding, positions = rows[is_of], is_padding[is_of], at + (positions - query_start_loc[:-1])[is_of]
            positions.masked_fill_(padding, 0)  # a run of padding may be longer than its block table
        blocks = tables[:, rows, positions // block_size].long()  # slots of a large pool need more than 32 bits
        slots = torch.where(padding, -1, blocks * block_size + positions % block_size)
        input_ids = torch.where(token_ids < 0, last_tokens.index_select(0, rows).clamp_(min=0), token_ids)
        return TokenPositions(input_ids, positions, slots, seq_lens.masked_fill_(is_padding, 0))

    def choose_tokens(
        self, logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor, last_tokens: Tensor | None = None
    ) -> Tensor:
        """One token for each row of logits: the highest, or for a temperature above 0 a draw from the tokens that min_p, top_k
        and top_p leave, in this order. A draw depends on the row's logits, seed and position alone.

        Args:
            logits: [n, vocab_size] float32; left as they are.
            rows: [n] int32: the row of the table for each.
            positions: [n] int32 or int64, position of each token in its sequence.
            last_tokens: [num_rows] int64: each token is also written into its row. None: it is not.

        Returns:
            [n] int64; where there is no finite highest logit `UNKNOWN`, or `NONE_LEFT` if all are -inf. NaN is the highest.
        """
        entries = rows.long()
        columns = (table.temperature, table.top_k, table.top_p, table.min_p)
        temperature, top_k, top_p, min_p = (column.index_select(0, entries) for column in columns)
        keys = sampling.position_keys(table.seeds.index_select(0, entries), positions.long())
        random = temperature > 0
        filtered = random & ((top_k > 0) | (top_p < 1) | (min_p > 0))
        temperature = temperature.clamp(min=sampling.LEAST_TEMPERATURE)
        tokens = self.draw_tokens(logits, keys, temperature * (random ^ filtered))
        group = (filtered & (tokens >= 0)).nonzero()[:, 0]
        if len(group):
            scaled = logits[group] / temperature[group, None]
            for part, values, token_ids in self.filter_tokens(scaled, top_k[group], top_p[group], min_p[group]):
                noise = sampling.gumbel_noise(keys[group[part]], token_ids)
                tokens[group[part]] = token_ids.gather(-1, (values + noise).argmax(-1, keepdim=True))[:, 0]
        if last_tokens is not None:
            last_tokens.index_copy_(0, entries, tokens)
        return tokens
