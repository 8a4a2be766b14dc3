"""Batches for a runner, without a scheduler."""

from __future__ import annotations

from typing import Any

from nanoengine import SamplingParams
from nanoengine.engine.messages import UNKNOWN, Phase, SampledBatch, SamplingRow, ScheduledBatch
from nanoengine.runner.model_runner import ModelRunner

TABLES = {0: [1, 2], 2: [4, 3], 5: [5, 6]}
"""Rows of some sequences, and their blocks."""


def prefill(num_tokens: int, *, computed: int = 0, sampled: bool = True) -> ScheduledBatch:
    return ScheduledBatch(
        Phase.PREFILL,
        seq_ids=[0],
        rows=[0],
        token_ids=list(range(10, 10 + num_tokens)),
        num_computed_tokens=[computed],
        num_new_tokens=[num_tokens],
        block_tables=[list(range(1, 2 + (computed + num_tokens) // 16))],
        sampled_rows=[0] if sampled else [],
        sampled_into=[0] if sampled else [],
        sampling=[SamplingRow(SamplingParams(temperature=0), 0, ())] if sampled else [],
    )


def execute(runner: ModelRunner, batch: ScheduledBatch) -> SampledBatch:
    return runner.launch(batch).result()


def decode(*seqs: tuple[int, int, int], tables: dict[int, list[int]], **params: Any) -> ScheduledBatch:
    """One token of each sequence: (row, tokens before, token). What they sample goes back into their rows."""
    rows = [row for row, _, _ in seqs]
    return ScheduledBatch(
        Phase.DECODE,
        seq_ids=rows,
        rows=rows,
        token_ids=[token for _, _, token in seqs],
        num_computed_tokens=[before for _, before, _ in seqs],
        num_new_tokens=[1] * len(seqs),
        block_tables=[tables[row] for row in rows],
        sampled_rows=list(range(len(seqs))),
        sampled_into=rows,
        sampling=[SamplingRow(SamplingParams(**{"temperature": 0} | params), row, ()) for row in rows],
    )


def chain(tables: dict[int, list[int]], num_steps: int, **params: Any) -> list[ScheduledBatch]:
    """Decode steps of some rows, from the beginning; of each token but the first only the device knows."""
    return [
        decode(*((row, step, UNKNOWN if step else 50 + row) for row in tables), tables=tables, **params)
        for step in range(num_steps)
    ]
