"""DraftModel: a small model that drafts the next tokens of sequences for a large one.

It computes every token that the large model computes, so that its K/V has the same length. A block has the K/V of both models: it
is cached, evicted, swapped and saved for both, and the policy does not know that there are two.

A draft is drawn with the noise of its position, as the large model's sample will be: where the two distributions are alike, they
draw the same token.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.attention import AttentionMetadata
from nanoengine.core.inputs import ALIGNED, InputBatch
from nanoengine.core.kv_cache import KVCache
from nanoengine.core.messages import UNKNOWN, Run, StepPlan
from nanoengine.core.model_runner import ModelRunner, RunnerPart
from nanoengine.core.qwen3 import DenseDecoder

NO_DRAFT = -3
"""Padding behind the last draft of a run: no sample is equal to it."""


class DraftModel(RunnerPart):
    """The draft model, a part of the runner of the large model.

    Args:
        model: with the tokens of the large model; the sizes of the embedding and of the logits may differ.
        kv_cache: the layers of the draft model, in the blocks of the large model's pool.
        group: the KV group of these blocks in the large model; its layers see all tokens.
        runner: of the large model.
    """

    def __init__(self, model: DenseDecoder, kv_cache: KVCache, group: int, runner: ModelRunner):
        self.model, self.kv_cache, self.group, self.runner = model, kv_cache, group, runner
        self.guesses: Tensor | None = None  # of the step that is being computed

    def guess(self, runs: list[Run], first: int, input_ids: Tensor) -> Tensor:
        """Draw the drafts of a step, one position of all runs after the other.

        Args:
            runs: with drafts that are all UNKNOWN, the longest first: those that have more drafts are the first ones, at every
                position.
            first: tokens of the step before those of the runs.
            input_ids: [num_tokens] int64, of the step; the drafts are written into it.

        Returns:
            [num_runs, most] int64: the drafts of each run, and NO_DRAFT behind them.
        """
        lengths, most, count = [len(run.drafts) for run in runs], len(runs[0].drafts), len(runs)
        numbers = np.zeros((4, -(-(count + 1) // ALIGNED) * ALIGNED), dtype=np.int32)
        numbers[0, :count] = [run.row for run in runs]
        numbers[1, :count] = [run.start for run in runs]
        numbers[2, :count] = first + np.cumsum([0, *(run.num_new for run in runs[:-1])])
        numbers[3, : count + 1] = np.arange(count + 1)
        rows, computed, token_starts, query_starts = self.runner.device.send(numbers)
        guesses = torch.full((count, most), NO_DRAFT, dtype=torch.int64, device=input_ids.device)
        tokens = torch.full((count,), UNKNOWN, dtype=torch.int64, device=input_ids.device)  # the rows' last tokens
        for depth in range(most):
            n = sum(length > depth for length in lengths)
            longest = max(run.start for run in runs[:n]) + depth + 1
            tokens = self._next(tokens[:n], rows[:n], computed[:n] + depth, query_starts[: n + 1], longest)
            guesses[:n, depth] = tokens
            input_ids.index_copy_(0, token_starts[:n].long() + 1 + depth, tokens)
        return guesses

    def _next(self, token_ids: Tensor, rows: Tensor, computed: Tensor, starts: Tensor, longest: int) -> Tensor:
        """[n] int64: the draft behind one token of each of n rows."""
        runner, n = self.runner, len(rows)
        tables, size = runner.rows.tables[self.group : self.group + 1], runner.block_size
        mapped = runner.kernels.compute_slot_mapping(
            token_ids.to(torch.int32), rows, starts, computed, runner.rows.last_tokens, tables, size, 1
        )
        metadata = AttentionMetadata(
            num_decodes=n,
            kv_cache=self.kv_cache.layers,
            query_start_loc=starts,
            seq_lens=mapped.seq_lens,
            block_tables=tables[0, :, : -(-longest // size)].index_select(0, rows),
            slot_mapping=mapped.slot_mapping[0],
            query_lens_list=[1] * n,
            seq_lens_list=[longest] * n,
        )
        hidden = self._forward(mapped.input_ids, mapped.positions, metadata)
        logits = self.model.compute_logits(hidden)[:, : runner.sampler.vocab_size].contiguous()
        # A row without a finite logit has any draft.
        return runner.kernels.choose_tokens(logits, runner.sampler.table, rows, computed + 1).clamp(min=0)

    def _forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        vocab_size = self.model.config.vocab_size
        if vocab_size < self.runner.sampler.vocab_size:
            input_ids = input_ids.clamp(max=vocab_size - 1)
        return self.model.forward(input_ids, positions, [metadata] * self.model.config.num_layers)

    # ---- RunnerPart

    def before_forward(self, plan: StepPlan, batch: InputBatch) -> None:
        """Draw the UNKNOWN drafts of a plan."""
        runs = plan.runs[: plan.num_drafted]
        is_open = bool(runs) and UNKNOWN in runs[0].drafts
        self.guesses = self.guess(runs, len(plan.decode_rows), batch.input_ids) if is_open else None

    def after_forward(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> None:
        """Compute the tokens of a step, for their K/V."""
        layer = self.runner.kv_cache.groups.index(self.group)
        self._forward(batch.input_ids, batch.positions, replace(batch.metadata[layer], kv_cache=self.kv_cache.layers))

    def close(self) -> None:
        del self.model, self.kv_cache
