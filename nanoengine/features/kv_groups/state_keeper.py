"""StateKeeper: the runner's part of states. It restores them, and takes snapshots, as a plan orders."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
from torch import Tensor

from nanoengine.core.inputs import InputBatch
from nanoengine.core.messages import StepPlan
from nanoengine.core.model_runner import ModelRunner, RunnerPart
from nanoengine.features.kv_groups.messages import STATE_ORDERS, StateOrders, TakeSnapshot
from nanoengine.features.kv_groups.state_pool import StatePool
from nanoengine.kernels.recurrences import StateRuns, Stores
from nanoengine.models.layers.mixer import Mixer, StateMetadata


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
