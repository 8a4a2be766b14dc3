"""EngineMetrics: one snapshot of all counters that there are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.outputs import FinishReason
from nanoengine.core.sequence import Sequence
from nanoengine.observability.cache_stats import CacheStats
from nanoengine.observability.kv_events import KVEventPublisher
from nanoengine.observability.observer import Observer
from nanoengine.observability.request_times import RequestTimes
from nanoengine.observability.step_stats import EngineStats


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """All counters at one moment. Counts are totals over the engine's life but for `num_waiting` to `max_concurrency`."""

    steps: EngineStats
    times: RequestTimes
    cache: CacheStats
    num_waiting: int
    num_fetching: int  # sequences that wait for K/V from files
    num_running: int
    num_in_flight: int  # steps
    kv_usage: float  # share of the KV pool in use, 0 to 1
    num_blocks: int  # of the KV pool
    block_size: int  # tokens
    max_model_len: int
    max_concurrency: float  # longest sequences that the pool holds
    num_preemptions: int
    num_requests: int  # submitted
    finished: dict[FinishReason, int] = field(default_factory=dict)  # completions by why they ended
    num_listener_errors: int = 0  # of the listener of KV events
    speculation: Any = None  # the statistics of capabilities, where they are there
    offload: Any = None


Sources = Mapping[str, Callable[[], Any]]
"""What other capabilities know, by name: "speculation" and "offload" (their statistics), and "fetching": a collection of the
sequences that wait for files.
"""


class Metrics:
    """Everything that observes one engine.

    Args:
        max_model_len: longest sequence in tokens.
        blocks_of_longest: blocks that a sequence of that length has at once.
        sources: see `Sources`; read whenever a snapshot is taken.
        observer: counts; it is a listener of the engine, too, and so is `events`.
    """

    def __init__(
        self,
        max_model_len: int,
        blocks_of_longest: int,
        observer: Observer,
        events: KVEventPublisher,
        *,
        sources: Sources | None = None,
    ):
        self.max_model_len, self.observer, self.events = max_model_len, observer, events
        self.sources = {} if sources is None else sources
        self.blocks_of_longest = blocks_of_longest

    def snapshot(self, engine: LLMEngine) -> EngineMetrics:
        """All counters now, copied. Called between two steps, in the engine's thread."""
        scheduler, observer = engine.scheduler, self.observer
        blocks = scheduler.blocks
        observer.flush()
        extra = {name: deepcopy(self.sources[name]()) for name in ("speculation", "offload") if name in self.sources}
        num_fetching = len(self.fetching())
        observer.cache.num_evicted_blocks = self.events.num_evicted
        return EngineMetrics(
            steps=copy(observer.steps),
            times=observer.times.snapshot(),
            cache=deepcopy(observer.cache),
            num_waiting=len(scheduler.waiting) - num_fetching,
            num_fetching=num_fetching,
            num_running=len(scheduler.running),
            num_in_flight=len(scheduler.in_flight),
            kv_usage=kv_usage(blocks),
            num_blocks=blocks.num_blocks,
            block_size=blocks.block_size,
            max_model_len=self.max_model_len,
            max_concurrency=blocks.num_blocks / self.blocks_of_longest,
            num_preemptions=scheduler.num_preemptions,
            num_requests=observer.num_requests,
            finished=dict(observer.finished_by_reason),
            num_listener_errors=self.events.num_errors,
            **extra,
        )

    def fetching(self) -> Collection[Sequence]:
        """Waiting sequences whose K/V are read from files."""
        found: Collection[Sequence] = self.sources.get("fetching", tuple)()
        return found

    def progress(self, engine: LLMEngine, before: EngineStats) -> str:
        """What the engine does now, and its rates since `before`, for a progress bar."""
        stats, scheduler = self.observer.steps.since(before), engine.scheduler
        return (
            f"prefill {stats.prefill_rate:.0f} tok/s, decode {stats.decode_rate:.0f} tok/s, "
            f"KV {kv_usage(scheduler.blocks):.0%}, running {len(scheduler.running)}, waiting {len(scheduler.waiting)}"
        )


def kv_usage(blocks: BlockManager) -> float:
    """Share of the KV pool that sequences hold, 0 to 1."""
    return 1 - blocks.num_free / blocks.num_blocks
