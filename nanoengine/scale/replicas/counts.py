"""Counters of replicas, for each slot and in total: they continue when a replica is lost and another is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from nanoengine.features.observability.metrics import EngineMetrics
from nanoengine.features.observability.view import FREE, MAX_CELLS, EngineView


class ReplicaCounters:
    """The last metrics and view of each replica, by the number of its slot."""

    def __init__(self) -> None:
        self._now: dict[int, tuple[EngineMetrics, EngineView]] = {}
        self._past: dict[int, EngineMetrics] = {}  # of lost replicas, added up

    def update(self, number: int, metrics_and_view: tuple[EngineMetrics, EngineView]) -> None:
        """Store the counters that the replica of a slot has sent."""
        self._now[number] = metrics_and_view

    def remove(self, number: int) -> None:
        """Remove the replica of a slot; its totals stay."""
        if number in self._now:
            metrics, _ = self._now.pop(number)
            gone = metrics.after_end()
            self._past[number] = gone + self._past[number] if number in self._past else gone

    def by_number(self) -> dict[int, EngineMetrics]:
        """The counters of each slot: of the replica there, and of its predecessors."""
        counters = {number: metrics for number, (metrics, _) in self._now.items()}
        for number, metrics in self._past.items():
            counters[number] = counters[number] + metrics if number in counters else metrics
        return dict(sorted(counters.items()))

    def views(self) -> list[EngineView]:
        return [view for _, (_, view) in sorted(self._now.items())]


def merged_views(views: Sequence[EngineView]) -> EngineView:
    """A view of several engines; the blocks of an engine follow the blocks of the engine before."""
    sequences, cells, num_blocks, totals = [], "", 0, views[0].totals
    for view in views:
        sequences += [
            dataclasses.replace(seq, blocks=[block + num_blocks for block in seq.blocks]) for seq in view.sequences
        ]
        num_blocks += view.pool.num_blocks
        cells = (cells + view.pool.cells).ljust(min(num_blocks, MAX_CELLS), FREE)
    for view in views[1:]:
        totals += view.totals
    pools = [view.pool for view in views]
    sums = _sums(pools, "num_blocks", "num_free", "num_cached", "num_used")
    pool = dataclasses.replace(pools[0], **sums, cells=cells[:MAX_CELLS].rstrip(FREE))
    sums = _sums(views, "num_running", "num_fetching", "num_waiting")
    return dataclasses.replace(views[0], **sums, sequences=sequences, pool=pool, totals=totals)


def _sums(objects: Sequence[Any], *names: str) -> dict[str, Any]:
    return {name: sum(getattr(each, name) for each in objects) for name in names}
