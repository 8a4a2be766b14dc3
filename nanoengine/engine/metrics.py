"""What the engine has done so far: EngineStats counts, EngineMetrics is one snapshot of all counters there are."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from nanoengine.engine.kv.statistics import CacheStats
from nanoengine.engine.messages import StepPlan, StepResult
from nanoengine.engine.request_times import RequestTimes
from nanoengine.outputs import FinishReason

if TYPE_CHECKING:
    from nanoengine.engine.scheduler import Scheduler
    from nanoengine.engine.speculation.speculation import SpeculationStats


@dataclass(slots=True)
class EngineStats:
    """Totals over the engine's life. Times in seconds; tokens are those computed, so prefix hits are not among them, nor are
    rejected drafts.

    The time of a step that computes prompts and decodes is shared out by their tokens.
    """

    prefill_tokens: int = 0
    prefill_time: float = 0.0
    decode_tokens: int = 0
    decode_time: float = 0.0
    num_prefill_steps: int = 0
    num_mixed_steps: int = 0
    num_decode_steps: int = 0

    def record(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        decoded = plan.num_decode_tokens
        total = plan.num_new_tokens
        if not total:
            return
        share = decoded / total
        self.decode_tokens += len(plan.decodes.rows) + len(plan.drafted) + sum(result.num_accepted)
        self.decode_time += share * seconds
        self.prefill_tokens += total - decoded
        self.prefill_time += (1 - share) * seconds
        if not plan.chunks:
            self.num_decode_steps += 1
        elif decoded:
            self.num_mixed_steps += 1
        else:
            self.num_prefill_steps += 1

    def since(self, before: EngineStats) -> EngineStats:
        """What was counted after the copy `before` was made."""
        return EngineStats(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens computed per second of prefill steps."""
        return self.prefill_tokens / self.prefill_time if self.prefill_time else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens generated per second of decode steps."""
        return self.decode_tokens / self.decode_time if self.decode_time else 0.0


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """All counters at one moment. Counts are totals over the engine's life but for `num_waiting` to `max_concurrency`."""

    steps: EngineStats
    times: RequestTimes
    cache: CacheStats
    num_waiting: int
    num_fetching: int  # that wait for K/V from files
    num_running: int
    num_in_flight: int  # steps
    kv_usage: float  # share of the KV pool in use, 0 to 1
    num_blocks: int  # of the KV pool
    block_size: int  # tokens
    max_model_len: int
    max_concurrency: float  # longest sequences that the pool holds
    num_preemptions: int
    num_swaps: int  # of the preemptions: blocks were copied to host memory
    num_recomputes: int
    num_forks: int
    num_requests: int  # submitted
    finished: dict[FinishReason, int] = field(default_factory=dict)  # completions by why they ended
    num_listener_errors: int = 0
    speculation: SpeculationStats | None = None


def take_snapshot(
    scheduler: Scheduler,
    stats: EngineStats,
    times: RequestTimes,
    finished: Counter[FinishReason],
    *,
    num_requests: int,
    num_listener_errors: int,
) -> EngineMetrics:
    """The counters of all rooms, copied."""
    manager, preemption = scheduler.block_manager, scheduler.preemption
    num_blocks, max_model_len = manager.pool.num_blocks, scheduler.max_model_len
    return EngineMetrics(
        steps=stats.since(EngineStats()),
        times=times.snapshot(),
        cache=deepcopy(manager.stats),
        num_waiting=len(scheduler.waiting),
        num_fetching=len(scheduler.fetching),
        num_running=len(scheduler.running),
        num_in_flight=scheduler.num_in_flight,
        kv_usage=manager.pool.usage,
        num_blocks=num_blocks,
        block_size=manager.block_size,
        max_model_len=max_model_len,
        max_concurrency=num_blocks / manager.groups.blocks_at_once(max_model_len),
        num_preemptions=scheduler.num_preemptions,
        num_swaps=preemption.num_swaps,
        num_recomputes=preemption.num_recomputes,
        num_forks=scheduler.num_forks,
        num_requests=num_requests,
        finished=dict(finished),
        num_listener_errors=num_listener_errors,
        speculation=None if scheduler.drafts is None else scheduler.drafts.speculation.snapshot(),
    )
