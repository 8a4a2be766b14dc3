"""StatePool: the states of all running sequences, and snapshots. StateKeeper: carries out the orders of a plan for them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.attention import KVLayer
from nanoengine.core.inputs import InputBatch
from nanoengine.core.messages import StepPlan
from nanoengine.core.model_runner import ModelRunner, RunnerPart
from nanoengine.features.kv_groups.messages import STATE_ORDERS, StateOrders, TakeSnapshot
from nanoengine.kernels.memory import zeros_in_huge_pages
from nanoengine.kernels.recurrences import StateRuns, Stores
from nanoengine.models.layers.mixer import Mixer, StateMetadata

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of the parts of a layer's state."""


class StatePool:
    """Slots, each with the states of all layers side by side, so that a slot is one copy: one for each row of the runner, one for
    padding, then those of snapshots. On a CPU, pages are allocated when a slot is first written.

    Args:
        block_bytes: of a block of the KV pool.

    Attributes:
        pieces: [num_slots * num_pieces, bytes] uint8: the slots in pieces that are no larger than a block.
    """

    def __init__(
        self,
        num_rows: int,
        num_snapshots: int,
        num_layers: int,
        shapes: Shapes,
        block_bytes: int,
        device: torch.device,
    ):
        numbers = num_layers * sum(map(math.prod, shapes))
        self.num_pieces = -(-numbers // (block_bytes // 4))
        size = num_rows + 1 + num_snapshots, -(-numbers // self.num_pieces) * self.num_pieces
        on_cpu = device.type == "cpu"
        dtype = torch.float32
        self.slots = zeros_in_huge_pages(size, dtype) if on_cpu else torch.zeros(size, dtype=dtype, device=device)
        self.pieces = self.slots.view(torch.uint8).view(len(self.slots) * self.num_pieces, -1)
        self.layers: list[KVLayer] = []
        at = 0
        for _ in range(num_layers):
            parts = []
            for shape in shapes:
                count = math.prod(shape)
                parts.append(self.slots[:, at : at + count].unflatten(1, shape) if count else self.slots[:, :0])
                at += count
            self.layers.append((parts[0], parts[1]))

    def copy(self, source: int, target: int) -> None:
        self.slots[target].copy_(self.slots[source])


class PendingDrafts(NamedTuple):
    """A run with drafts whose accepted tokens are not in the states of its row yet."""

    start: int  # tokens before the run
    first: int  # index of the run's first token in `projected`
    projected: dict[int, Tensor]  # index of a mixer -> its projections of all tokens of that step


class StateKeeper(RunnerPart):
    """The runner's part of states: it zeros or restores the states of rows that start, copies snapshots, and applies accepted
    drafts.

    A run with drafts does not change the states; the projections of its tokens are cached. The start of the row's next run says
    how many were accepted: these are applied first, token by token, as without drafts.

    In the KV cache of the runner, states of all layers are behind K and V of all layers: a layer may have both, or neither.

    Args:
        mixers: layers with states.
        attending: layers with K and V.
    """

    def __init__(self, runner: ModelRunner, pool: StatePool, mixers: Mapping[int, Mixer], attending: Collection[int]):
        self.pool, self.mixers, self.device = pool, mixers, runner.device
        self._drafted: dict[int, PendingDrafts] = {}
        self._inside: dict[int, list[TakeSnapshot]] = {}  # row -> snapshots of this step
        cache, count = runner.kv_cache, len(runner.model.layers)
        groups, empty = dict(zip(attending, cache.groups, strict=False)), pool.layers[0]
        of_layers = dict(zip(attending, cache.layers, strict=False)), dict(zip(mixers, pool.layers, strict=True))
        cache.groups = [groups.get(layer, 0) for layer in range(count)]
        cache.layers = [tensors.get(layer, empty) for tensors in of_layers for layer in range(count)]

    def begin(self, plan: StepPlan) -> None:
        for row in plan.ended:
            self._drafted.pop(row, None)
        orders: StateOrders = plan.extras.get(STATE_ORDERS) or StateOrders()
        restored = dict(orders.restores)
        for started in plan.started:
            self._drafted.pop(started.row, None)
            if (source := restored.get(started.row)) is None:
                self.pool.slots[started.row].zero_()
            elif source != started.row:
                self.pool.copy(source, started.row)
        self._inside = {}
        if not self._drafted and not orders.snapshots:
            return
        starts = dict(zip(plan.decode_rows.tolist(), plan.decode_starts.tolist(), strict=True))
        starts |= {run.row: run.start for run in plan.runs}
        early: dict[int, list[TakeSnapshot]] = {}
        for order in orders.snapshots:
            (self._inside if order.position > starts[order.row] else early).setdefault(order.row, []).append(order)
        ready: dict[int, list[int]] = {}  # rows whose drafts one step computed
        for row, drafted in self._drafted.items():
            if row in starts:
                ready.setdefault(id(drafted.projected), []).append(row)
        for rows in ready.values():
            self._apply(rows, starts, early)
        for row, snapshots in early.items():
            for order in snapshots:
                assert order.position == starts[row]
                self.pool.copy(row, order.slot)

    def _apply(self, rows: list[int], starts: Mapping[int, int], early: dict[int, list[TakeSnapshot]]) -> None:
        """Advance the states of rows by the accepted drafts of one step, up to the start of their next runs."""
        runs, indices, inside = list[tuple[int, int, int, bool]](), list[int](), dict[int, list[TakeSnapshot]]()
        for row in rows:
            start, first, projected = self._drafted.pop(row)
            end, orders = starts[row], early.pop(row, [])
            runs.append((row, start, end - start, False))
            indices += range(first, first + end - start)
            inside[row] = [order for order in orders if order.position < end]
            early[row] = [order for order in orders if order.position == end]
        sent = self._ints(rows, list(accumulate((count for _, _, count, _ in runs), initial=0)), indices)
        state_runs = StateRuns(sent[0], sent[1], self._stores(runs, inside))
        for mixer, states in zip(self.mixers.values(), self.pool.layers, strict=True):
            mixer.mix(projected[mixer.state_index].index_select(0, sent[2]), states, state_runs)

    def before_forward(self, plan: StepPlan, batch: InputBatch) -> None:
        if not self._inside and not plan.num_drafted:
            return
        decodes = zip(plan.decode_rows.tolist(), plan.decode_starts.tolist(), strict=True)
        runs = [(row, start, 1, False) for row, start in decodes]
        runs += [(run.row, run.start, run.num_new, bool(run.drafts)) for run in plan.runs]
        projected: dict[int, Tensor] = {}
        first = accumulate((count for _, _, count, _ in runs), initial=0)
        for at, (row, start, _, is_drafted) in zip(first, runs, strict=False):
            if is_drafted:
                self._drafted[row] = PendingDrafts(start, at, projected)
        stores = self._stores(runs, self._inside)
        keeps = plan.num_drafted > 0
        for layer in self.mixers:
            metadata = batch.metadata[layer]
            fields = {name: getattr(metadata, name) for name in metadata.__dataclass_fields__}
            batch.metadata[layer] = StateMetadata(
                **fields, stores=stores, projections=projected, keeps_projections=keeps
            )

    def _stores(self, runs: list[tuple[int, int, int, bool]], inside: Mapping[int, list[TakeSnapshot]]) -> Stores:
        """The tokens of runs (row, start, tokens, whether it has drafts) behind which states are written, and the slots."""
        starts, tokens, slots, first = [0], list[int](), list[int](), 0
        for row, start, count, is_drafted in runs:
            for order in inside.get(row, []):
                tokens.append(first + order.position - start - 1)
                slots.append(order.slot)
            first += count
            if not is_drafted:
                tokens.append(first - 1)
                slots.append(row)
            starts.append(len(tokens))
        return Stores(*self._ints(starts, tokens, slots))

    def _ints(self, *parts: list[int]) -> tuple[Tensor, ...]:
        """Lists of integers as int32 tensors on the device, sent in one copy."""
        sent = self.device.send(np.array([*chain(*parts)], np.int32))
        return sent.split([len(part) for part in parts])
