"""What replicas count, by replica and all together: it goes on when a replica is lost and another comes in its place."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

from nanoengine.observability.histogram import Histogram
from nanoengine.observability.metrics import EngineMetrics
from nanoengine.observability.view import FREE, MAX_CELLS, EngineView, PoolView

EQUAL = ("max_model_len", "block_size", "step_seconds", "bounds")
"""Fields that are no counts: those of the first are as good as any."""

OF_NOW = ("num_waiting", "num_fetching", "num_running", "num_in_flight", "num_blocks", "max_concurrency", "kv_usage")
"""Fields that say how things stand, and not what has happened: a replica that is gone has none of it."""


class Counts:
    """The last that replicas told: (EngineMetrics, EngineView), by the numbers of their places."""

    def __init__(self) -> None:
        self._now: dict[int, Any] = {}
        self._past: dict[int, EngineMetrics] = {}  # of replicas that are gone

    def take(self, number: int, told: Any) -> None:
        self._now[number] = told

    def leave(self, number: int) -> None:
        """The replica there is gone: what it has counted stays."""
        if (told := self._now.pop(number, None)) is not None:
            gone = dataclasses.replace(told[0], **dict.fromkeys(OF_NOW, 0))
            self._past[number] = merged([gone, *([self._past[number]] if number in self._past else [])])

    def by_number(self) -> dict[int, EngineMetrics]:
        found = {}
        for number in sorted({*self._now, *self._past}):
            own = [self._now[number][0]] if number in self._now else []
            found[number] = merged([*own, *([self._past[number]] if number in self._past else [])])
        return found

    def views(self) -> list[EngineView]:
        return [self._now[number][1] for number in sorted(self._now)]


def merged(all_metrics: Sequence[EngineMetrics]) -> EngineMetrics:
    """The counts of several engines together."""
    found = cast(EngineMetrics, _sum(all_metrics))
    num_blocks = sum(own.num_blocks for own in all_metrics)
    usage = sum(own.kv_usage * own.num_blocks for own in all_metrics) / num_blocks if num_blocks else 0.0
    return dataclasses.replace(found, kv_usage=usage)


def _sum(values: Sequence[Any]) -> Any:
    """Numbers are added, and what consists of them part by part; of all else the first is taken."""
    first = values[0]
    if isinstance(first, bool) or first is None or len(values) == 1:
        return first
    if isinstance(first, int | float):
        return sum(values)
    if isinstance(first, Histogram):
        total = Histogram(first.bounds)
        total.counts = [sum(column) for column in zip(*(own.counts for own in values), strict=True)]
        total.sum = sum(own.sum for own in values)
        return total
    if isinstance(first, Mapping):
        counts: Counter[Any] = Counter()
        for own in values:
            counts.update(own)
        return dict(counts)
    if isinstance(first, list):
        return [sum(own[i] for own in values if i < len(own)) for i in range(max(map(len, values)))]
    if isinstance(first, deque):
        return deque((item for own in values for item in own), maxlen=first.maxlen)
    if dataclasses.is_dataclass(first):
        parts = {
            own.name: getattr(first, own.name) if own.name in EQUAL else _sum([getattr(v, own.name) for v in values])
            for own in dataclasses.fields(first)
        }
        return type(first)(**parts) if not isinstance(first, type) else first
    if hasattr(first, "__dict__"):  # RequestTimes
        total = object.__new__(type(first))
        total.__dict__.update({name: _sum([getattr(own, name) for own in values]) for name in vars(first)})
        return total
    return first


def merged_views(views: Sequence[EngineView]) -> EngineView:
    """A picture of several engines; their blocks stand one behind the other."""
    sequences, cells, offset = [], "", 0
    for view in views:
        sequences += [
            dataclasses.replace(seq, blocks=[block + offset if block else 0 for block in seq.blocks])
            for seq in view.sequences
        ]
        offset += view.pool.num_blocks
        cells = (cells + view.pool.cells).ljust(min(offset, MAX_CELLS), FREE)
    pools = [view.pool for view in views]
    pool = cast(PoolView, dataclasses.replace(_sum(pools), cells=cells[:MAX_CELLS].rstrip(FREE)))
    return dataclasses.replace(
        views[0],
        num_running=sum(view.num_running for view in views),
        num_fetching=sum(view.num_fetching for view in views),
        num_waiting=sum(view.num_waiting for view in views),
        sequences=sequences,
        pool=pool,
        totals=_sum([view.totals for view in views]),
    )
