"""DraftModel: a small model that guesses the next tokens of sequences for a large one.

It computes the tokens that the large one computes, so that its K/V is always as far. A block has room for the K/V of both: what
is shared, evicted, swapped, saved or found of the one is of the other too, and nobody above knows that there are two.

A guess is drawn with the noise that belongs to its position, as the large model's sample will be: where the two find the same
tokens likely, they choose the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.attention import AttentionMetadata
from nanoengine.core.sampling import SamplingTable
from nanoengine.engine.messages import UNKNOWN, Drafted
from nanoengine.kernels.interface import Kernels
from nanoengine.models.decoder import Decoder
from nanoengine.runner.drafts import NO_DRAFT
from nanoengine.runner.inputs import ALIGNED, InputBatch
from nanoengine.runner.kv_cache import KVCache
from nanoengine.runner.rows import Rows
from nanoengine.runner.stream import Stream, send_array


@dataclass
class DraftModel:
    """The model, and where its K/V is.

    Args:
        model: with the tokens of the large one; embeddings and logits may be more or fewer.
        kv_cache: its own layers, in the blocks of the large one's pool.
        group: the KV group of the large one whose blocks these are; it forgets nothing.
        table: how tokens are chosen, by row.
        vocab_size: of the large one.
    """

    model: Decoder
    kv_cache: KVCache
    group: int
    kernels: Kernels
    rows: Rows
    stream: Stream
    table: SamplingTable
    vocab_size: int
    block_size: int

    def follow(self, inputs: InputBatch, groups: list[int]) -> None:
        """Compute the tokens of a step, for their K/V.

        Args:
            groups: the KV group of each layer of the large model.
        """
        seen = replace(inputs.metadata[groups.index(self.group)], kv_cache=self.kv_cache.layers)
        self._forward(inputs.input_ids, inputs.positions, seen)

    def guess(self, runs: list[Drafted], first: int, token_ids: Tensor) -> Tensor:
        """Guess the drafts of a step, one place of all runs after the other.

        Args:
            runs: with drafts that are all UNKNOWN.
            first: tokens of the step before those of the runs.
            token_ids: [num_tokens] int32, of the step; the guesses are written to their places.

        Returns:
            [num_runs, most] int64, as `Drafts` has them.
        """
        # The longest first: the runs that go on are then the first ones, at every place.
        order = sorted(range(len(runs)), key=lambda i: -len(runs[i].drafts))
        starts = first + np.cumsum([0, *(run.num_new for run in runs[:-1])])
        lengths = [len(runs[i].drafts) for i in order]
        most, count = lengths[0], len(runs)
        numbers = np.zeros((4, -(-(count + 1) // ALIGNED) * ALIGNED), dtype=np.int32)
        numbers[0, :count] = [runs[i].row for i in order]
        numbers[1, :count] = [runs[i].num_computed for i in order]
        numbers[2, :count] = starts[order]
        numbers[3, : count + 1] = np.arange(count + 1)
        rows, computed, places, query_starts = send_array(numbers, self.stream)
        guesses = torch.full((count, most), NO_DRAFT, dtype=torch.int64, device=token_ids.device)
        tokens = torch.full((count,), UNKNOWN, dtype=torch.int32, device=token_ids.device)  # the last ones of the rows
        for place in range(most):
            n = sum(length > place for length in lengths)
            longest = max(runs[i].num_computed for i in order[:n]) + place + 1
            chosen = self._next(tokens[:n], rows[:n], computed[:n] + place, query_starts[: n + 1], longest)
            guesses[:n, place] = chosen
            tokens = chosen.to(torch.int32)
            token_ids.index_copy_(0, places[:n].long() + 1 + place, tokens)
        original = send_array(np.argsort(np.array(order, dtype=np.int64)), self.stream)
        return guesses.index_select(0, original)

    def _next(self, token_ids: Tensor, rows: Tensor, computed: Tensor, starts: Tensor, longest: int) -> Tensor:
        """[n] int64: what follows one token of each of n rows."""
        tables, n = self.rows.tables[self.group : self.group + 1], len(rows)
        place = (token_ids, rows, starts, computed, self.rows.last_tokens, tables, self.block_size, 1)
        placed = self.kernels.compute_slot_mapping(*place)
        num_blocks = -(-longest // self.block_size)
        metadata = AttentionMetadata(
            num_decodes=n,
            kv_cache=self.kv_cache.layers,
            query_start_loc=starts,
            seq_lens=placed.seq_lens,
            block_tables=tables[0, :, :num_blocks].index_select(0, rows),
            slot_mapping=placed.slot_mapping[0],
            query_lens_list=[1] * n,
            seq_lens_list=[longest] * n,
        )
        hidden = self._forward(placed.input_ids, placed.positions, metadata)
        logits = self.model.compute_logits(hidden)[:, : self.vocab_size].contiguous()
        # A row without a finite logit guesses anything.
        return self.kernels.choose_tokens(logits, self.table, rows, computed + 1).clamp(min=0)

    def _forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        known = self.model.config.vocab_size
        if known < self.vocab_size:
            input_ids = input_ids.clamp(max=known - 1)
        return self.model.forward(input_ids, positions, [metadata] * self.model.config.num_layers)
