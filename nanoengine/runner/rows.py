"""Rows: what the device keeps of each running sequence from step to step, so that a step sends only what changed.

The scheduler gives every running sequence a row, and one row is nobody's: a batch is filled up with it. A row holds the newest
token, which sampling writes and the next step reads without the host having seen it; the block table; and how tokens are sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanoengine.engine.kv.block_pool import NULL_BLOCK
from nanoengine.engine.messages import SamplingRow, ScheduledBatch
from nanoengine.kernels.gumbel import signed
from nanoengine.runner.stream import Stream, send


@dataclass
class SamplingTable:
    """How each row is sampled; the fields are the arguments of `Kernels.choose_tokens`."""

    temperature: Tensor  # [num_rows] float32; 0: greedy
    top_k: Tensor  # [num_rows] int32; 0: all
    top_p: Tensor  # [num_rows] float32
    min_p: Tensor  # [num_rows] float32
    seeds: Tensor  # [num_rows] int64


@dataclass
class Changes:
    """What has changed since the last batch, on its way to the device."""

    cells: Tensor | None  # [n] int64: places in the block tables, row after row
    blocks: Tensor | None  # [n] int32: what stands there now
    rows: Tensor | None  # [m] int64: rows that are sampled differently now
    floats: Tensor | None  # [3 * m] float32: temperature, top_p, min_p
    integers: Tensor | None  # [2 * m] int64: top_k, seeds


class Rows:
    """The rows of one engine.

    Args:
        num_rows: most sequences that run at once.
        width: most blocks of a sequence.
        stream: where work on them is done.
    """

    def __init__(self, num_rows: int, width: int, stream: Stream):
        self.stream = stream
        self.nobody = num_rows
        count, place = num_rows + 1, stream.torch_device
        self.newest = torch.zeros(count, dtype=torch.int64, device=place)
        self.tables = torch.full((count, width), NULL_BLOCK, dtype=torch.int32, device=place)
        self.sampling = SamplingTable(
            temperature=torch.zeros(count, device=place),
            top_k=torch.zeros(count, dtype=torch.int32, device=place),
            top_p=torch.ones(count, device=place),
            min_p=torch.zeros(count, device=place),
            seeds=torch.zeros(count, dtype=torch.int64, device=place),
        )
        # What was sent: the lists and objects themselves, compared by identity.
        self._tables: list[list[int] | None] = [None] * num_rows
        self._lengths = [0] * num_rows
        self._sampling: list[SamplingRow | None] = [None] * num_rows

    @property
    def width(self) -> int:
        return self.tables.shape[1]

    def find_changes(self, batch: ScheduledBatch) -> Changes:
        """Compare a batch with what was sent before, and send the difference. Block tables only grow, or are other lists."""
        cells: list[int] = []
        blocks: list[int] = []
        for row, table in zip(batch.rows, batch.block_tables, strict=True):
            if self._tables[row] is not table:
                self._tables[row] = table
                self._lengths[row] = 0
            known = self._lengths[row]
            if known < len(table):
                cells += range(row * self.width + known, row * self.width + len(table))
                blocks += table[known:]
                self._lengths[row] = len(table)
        new: dict[int, SamplingRow] = {}
        for row, sampling in zip(batch.sampled_into, batch.sampling, strict=True):
            if self._sampling[row] is not sampling:
                self._sampling[row] = new[row] = sampling
        return Changes(
            cells=self._send(cells, np.int64),
            blocks=self._send(blocks, np.int32),
            rows=self._send(list(new), np.int64),
            floats=self._send(
                [
                    value
                    for name in ("temperature", "top_p", "min_p")
                    for value in (getattr(row.params, name) for row in new.values())
                ],
                np.float32,
            ),
            integers=self._send(
                [max(row.params.top_k, 0) for row in new.values()] + [signed(row.seed) for row in new.values()],
                np.int64,
            ),
        )

    def _send(self, values: list[int] | list[float], dtype: type) -> Tensor | None:
        return send(np.array(values, dtype=dtype), self.stream) if values else None

    def apply(self, changes: Changes) -> None:
        """Make the changes, on the device."""
        if changes.cells is not None and changes.blocks is not None:
            self.tables.view(-1).index_copy_(0, changes.cells, changes.blocks)
        if changes.rows is not None and changes.floats is not None and changes.integers is not None:
            table = self.sampling
            temperature, top_p, min_p = changes.floats.view(3, -1)
            top_k, seeds = changes.integers.view(2, -1)
            table.temperature.index_copy_(0, changes.rows, temperature)
            table.top_p.index_copy_(0, changes.rows, top_p)
            table.min_p.index_copy_(0, changes.rows, min_p)
            table.top_k.index_copy_(0, changes.rows, top_k.to(torch.int32))
            table.seeds.index_copy_(0, changes.rows, seeds)
