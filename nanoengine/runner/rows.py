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
        num_groups: KV groups.
        width: most blocks of a sequence in any of them.
        stream: where work on them is done.

    Attributes:
        padding_row: the one behind the last.
        last_tokens: [num_rows + 1] int64.
        tables: [num_groups, num_rows + 1, width] int32: block tables.
        token_ids: on the host, of each row that was started: its tokens then, from which chunks take theirs.
        prompt_logprobs: of the rows that want log probabilities of their prompts, how many per token.
    """

    def __init__(self, num_rows: int, num_groups: int, width: int, stream: Stream):
        self.stream = stream
        self.padding_row = num_rows
        count, place = num_rows + 1, stream.torch_device
        self.last_tokens = torch.zeros(count, dtype=torch.int64, device=place)
        self.tables = torch.full((num_groups, count, width), NULL_BLOCK, dtype=torch.int32, device=place)
        self.token_ids: dict[int, list[int]] = {}
        self.prompt_logprobs: dict[int, int] = {}

    def apply(self, plan: StepPlan) -> None:
        """Make the changes of a plan, all in one copy to the device."""
        for row in plan.ended:
            self.token_ids.pop(row, None)
            self.prompt_logprobs.pop(row, None)
        if not (plan.started or plan.tables):
            return
        rows = [start.row for start in plan.started]
        cells = self._cells(plan)
        counts = [len(rows), len(rows), len(cells), len(cells)]
        numbers = [*rows, *(start.token_ids[-1] for start in plan.started), *cells, *cells.values()]
        targets, tokens, places, blocks = send(np.array(numbers, dtype=np.int64), self.stream).split(counts)
        if rows:
            self.last_tokens.index_copy_(0, targets, tokens)
        self.tables.view(-1).index_copy_(0, places, blocks.to(torch.int32))
        for start in plan.started:
            self.token_ids[start.row] = start.token_ids
            self.prompt_logprobs.pop(start.row, None)
            if start.sampling.prompt_logprobs is not None:
                self.prompt_logprobs[start.row] = start.sampling.prompt_logprobs

    def _cells(self, plan: StepPlan) -> dict[int, int]:
        """Which places of the tables change, and what stands there now; a later change of the same place wins."""
        _, num_rows, width = self.tables.shape
        new: dict[int, int] = {}
        for row, _, tables, _ in plan.started:
            for group, table in enumerate(tables):
                first = (group * num_rows + row) * width
                new.update(zip(range(first, first + width), table, strict=False))
        for row, group, entry, block_ids in plan.tables:
            first = (group * num_rows + row) * width + entry
            new.update(zip(range(first, first + len(block_ids)), block_ids, strict=True))
        return new
