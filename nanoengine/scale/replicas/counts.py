"""Counters of replicas, for each replica and of all: they go on when a replica is lost and another comes in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nanoengine.features.observability.metrics import EngineMetrics
from nanoengine.features.observability.view import FREE, MAX_CELLS, EngineView, PoolView


class Counts:
    """The last metrics and view of each replica, by the number of its slot."""

    def __init__(self) -> None:
        self._now: dict[int, tuple[EngineMetrics, EngineView]] = {}
        self._past: dict[int, EngineMetrics] = {}  # of replicas that are gone

    def take(self, number: int, metrics_and_view: tuple[EngineMetrics, EngineView]) -> None:
        """The replica of a slot has sent its counters."""
        self._now[number] = metrics_and_view

    def leave(self, number: int) -> None:
        """The replica of a slot is gone; its totals stay."""
        if number in self._now:
            metrics, _ = self._now.pop(number)
            gone = metrics.of_the_past()
            self._past[number] = gone + self._past[number] if number in self._past else gone

    def by_number(self) -> dict[int, EngineMetrics]:
        """The counters of each slot: of the replica there, and of those before it."""
        found = {number: metrics for number, (metrics, _) in self._now.items()}
        for number, metrics in self._past.items():
            found[number] = found[number] + metrics if number in found else metrics
        return dict(sorted(found.items()))

    def views(self) -> list[EngineView]:
        return [view for _, (_, view) in sorted(self._now.items())]


def merged_views(views: Sequence[EngineView]) -> EngineView:
    """A view of several engines; the blocks of the next engine come behind those of the one before."""
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
    return dataclasses.replace(
        views[0],
        num_running=sum(view.num_running for view in views),
        num_fetching=sum(view.num_fetching for view in views),
        num_waiting=sum(view.num_waiting for view in views),
        sequences=sequences,
        pool=PoolView(
            num_blocks,
            pools[0].block_size,
            num_free=sum(pool.num_free for pool in pools),
            num_cached=sum(pool.num_cached for pool in pools),
            num_used=sum(pool.num_used for pool in pools),
            cells=cells[:MAX_CELLS].rstrip(FREE),
        ),
        totals=totals,
    )
