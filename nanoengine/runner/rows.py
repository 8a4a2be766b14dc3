"""Rows: what the device keeps of each running sequence from step to step; a step sends only what a plan says has changed.

The scheduler gives every running sequence a row, and one more is padding: recorded steps are filled up with it. A row holds the
last token, which sampling writes and the next step reads without the host having seen it, and a block table per KV group. What it
holds counts from its start in a plan; nothing is found out by comparing.
"""

from __future__ import annotations

import numpy as np
import torch

from nanoengine.engine.kv.block_pool import NULL_BLOCK
from nanoengine.engine.messages import StepPlan
from nanoengine.runner.stream import Stream, send


class Rows:
    """The rows of one engine.

    Args:
        num_rows: most sequences that run at once.
        widths: most blocks of a sequence in each KV group.
        stream: where work on them is done.

    Attributes:
        padding_row: the one behind the last.
        last_tokens: [num_rows + 1] int64.
        tables: per KV group, [num_rows + 1, width] int32.
        token_ids: on the host, of each row that was started: its tokens then, from which chunks take theirs.
        prompt_logprobs: of the rows that want log probabilities of their prompts, how many per token.
    """

    def __init__(self, num_rows: int, widths: list[int], stream: Stream):
        self.stream = stream
        self.padding_row = num_rows
        count, place = num_rows + 1, stream.torch_device
        self.last_tokens = torch.zeros(count, dtype=torch.int64, device=place)
        self.tables = [torch.full((count, width), NULL_BLOCK, dtype=torch.int32, device=place) for width in widths]
        self.token_ids: dict[int, list[int]] = {}
        self.prompt_logprobs: dict[int, int] = {}

    def apply(self, plan: StepPlan) -> None:
        """Make the changes of a plan, all in one copy to the device."""
        for row in plan.ended:
            self.token_ids.pop(row, None)
            self.prompt_logprobs.pop(row, None)
        if not (plan.started or plan.grown or plan.replaced):
            return
        rows = [start.row for start in plan.started]
        numbers = [*rows, *(start.token_ids[-1] for start in plan.started)]
        counts = [len(rows), len(rows)]
        for group, table in enumerate(self.tables):
            cells, blocks = _cells(plan, group, table.shape[1])
            numbers += [*cells, *blocks]
            counts += [len(cells), len(blocks)]
        pieces = send(np.array(numbers, dtype=np.int64), self.stream).split(counts)
        if rows:
            self.last_tokens.index_copy_(0, pieces[0], pieces[1])
        for table, cells_there, blocks_there in zip(self.tables, pieces[2::2], pieces[3::2], strict=True):
            table.view(-1).index_copy_(0, cells_there, blocks_there.to(torch.int32))
        for start in plan.started:
            self.token_ids[start.row] = start.token_ids
            self.prompt_logprobs.pop(start.row, None)
            if start.sampling.prompt_logprobs is not None:
                self.prompt_logprobs[start.row] = start.sampling.prompt_logprobs


def _cells(plan: StepPlan, group: int, width: int) -> tuple[list[int], list[int]]:
    """Places in the tables of a group, row after row, and what stands there now."""
    new: dict[int, int] = {}  # a later change of the same place wins
    for row, _, tables, _ in plan.started:
        new.update(zip(range(row * width, (row + 1) * width), tables[group], strict=False))
    for grown in plan.grown:
        if grown.group == group:
            first = grown.row * width + grown.first
            new.update(zip(range(first, first + len(grown.block_ids)), grown.block_ids, strict=True))
    for replaced in plan.replaced:
        if replaced.group == group:
            new[replaced.row * width + replaced.entry] = replaced.block_id
    return list(new), list(new.values())
