"""Observer: all counters of an engine, and snapshots of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.messages import StepResult
from nanoengine.core.outputs import FinishReason
from nanoengine.core.scheduler import Step
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Request, Sequence
from nanoengine.features.observability.kv_events import KVEventPublisher
from nanoengine.features.observability.metrics import (
    CacheStats,
    EngineMetrics,
    EngineStats,
    RequestMetrics,
    RequestTimes,
)

TIMES = "observability.times"
"""The `SequenceTimes` of a sequence, in `Sequence.state`."""

Sources = Mapping[str, Callable[[], Any]]
"""Functions of other capabilities, by name: "speculation" and "offload" return their statistics, "fetching" the sequences that
wait for files.
"""


@dataclass(slots=True)
class SequenceTimes:
    """Times of the events of one sequence, in seconds of the observer's clock, and the number of its counted tokens."""

    num_counted: int = 0  # tokens, the prompt included
    started: float | None = None  # the first time
    first_token: float | None = None
    last_token: float | None = None


class Observer(PolicyPart):
    """The observer of one engine.

    Args:
        max_model_len: longest sequence in tokens.
        blocks_of_longest: blocks of a sequence of that length.
        enable_prefix_caching: whether sequences look up cached prefixes.
        sources: see `Sources`; called for each snapshot.
        clock: seconds; that of `Request.arrival_time`.

    Attributes:
        events: of the prefix cache; one of the engine's stores.
    """

    def __init__(
        self,
        max_model_len: int,
        blocks_of_longest: int = 1,
        *,
        enable_prefix_caching: bool = True,
        sources: Sources | None = None,
        clock: Callable[[], float] = perf_counter,
    ):
        self.max_model_len, self.blocks_of_longest = max_model_len, blocks_of_longest
        self.enable_prefix_caching, self.clock = enable_prefix_caching, clock
        self.sources: Sources = {} if sources is None else sources
        self.events = KVEventPublisher()
        self.steps, self.cache, self.times = EngineStats(), CacheStats(), RequestTimes.new(max_model_len)
        self.finished_by_reason: Counter[FinishReason] = Counter()
        self.num_requests = 0
        self._starts: dict[int, float] = {}  # of the steps in flight, by their numbers
        self._last_end = float("-inf")
        self._last_step = (0, 0)  # prompt tokens and generated tokens of the last step, not in `times` yet

    # ---- PolicyPart

    def complete(self, step: Step) -> None:
        """A step begins."""
        now = self._starts[step.number] = self.clock()
        if not step.started:
            return
        firsts = {seq: run.start for seq, run in zip(step.runs, step.plan.runs, strict=True)}
        for seq in step.started:
            times: SequenceTimes = seq.state[TIMES]
            if self.enable_prefix_caching and seq.reads_cache:
                num_cached = firsts.get(seq, seq.num_computed)
                self.cache.record(len(seq.token_ids), num_cached, resumed=times.started is not None)
            if times.started is None:
                times.started = now

    def submitted(self, request: Request) -> None:
        if request.arrival_time is None:
            request.arrival_time = self.clock()
        request.metrics = RequestMetrics()
        self.num_requests += 1
        for seq in request.sequences:
            seq.state[TIMES] = SequenceTimes(len(seq.token_ids))

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        now, start = self.clock(), self._starts.pop(step.number)
        seconds, self._last_end = now - max(start, self._last_end), now
        if isinstance(result, BaseException) or step.is_dropped:
            return
        self._flush()
        chunks = {seq: run.num_new for seq, run in zip(step.runs, step.plan.runs, strict=True) if not run.drafts}
        num_generated = num_of_prompts = 0  # new tokens; those sampled by chunks of prompts
        gaps: Counter[float] = Counter()  # by the time of the token before: mostly that of the last step
        for seq in seqs:
            times: SequenceTimes = seq.state[TIMES]
            num_tokens, last = len(seq.token_ids), times.last_token
            num_new = num_tokens - times.num_counted
            if not num_new:
                continue
            times.num_counted, times.last_token = num_tokens, now
            num_generated += num_new
            if chunks and seq in chunks:
                num_of_prompts += num_new
            if last is None:
                self._first_token(seq, times, now)
            else:
                gaps[last] += 1
        for last, count in gaps.items():
            self.times.inter_token_latency.observe(now - last, count)
        num_prompt = sum(chunks.values())
        self.steps.record(num_prompt, step.plan.num_tokens - num_prompt, num_generated - num_of_prompts, seconds)
        self._last_step = num_prompt, num_generated

    def _first_token(self, seq: Sequence, times: SequenceTimes, now: float) -> None:
        request = seq.request
        assert request.arrival_time is not None
        times.first_token = now
        self.times.time_to_first_token.observe(now - request.arrival_time)
        self.times.num_prompt_tokens += seq.num_prompt_tokens
        self.times.num_cached_prompt_tokens += seq.num_cached_tokens or 0
        if request.metrics.ttft is None:
            request.metrics = RequestMetrics(ttft=now - request.arrival_time)

    def _flush(self) -> None:
        """Count the last step, whose texts are complete."""
        num_prompt, num_generated = self._last_step
        self.times.num_generated_tokens += num_generated
        if num_prompt or num_generated:
            self.times.tokens_of_step.observe(num_prompt + num_generated)
        self._last_step = 0, 0

    def concerns(self, seq: Sequence) -> bool:
        return False

    def finished(self, seq: Sequence) -> None:
        times, request = seq.state[TIMES], seq.request
        # Tokens behind a stop string were accepted drafts of the last step. They are dropped when its text is made.
        num_dropped = times.num_counted - len(seq.token_ids)
        if num_dropped:
            self.steps.decode_tokens -= num_dropped
            self._last_step = self._last_step[0], self._last_step[1] - num_dropped
        if seq.finish_reason is not None:
            self.finished_by_reason[seq.finish_reason] += 1
            if seq.finish_reason != "abort":
                self._count_end(seq, times, self.clock())
        if request.finished:
            request.metrics = _metrics_of_finished(request)
            if all(each.finish_reason != "abort" for each in request.sequences):
                self.times.num_completions.observe(request.params.n)
                self.times.longest_generated.observe(_longest(request))

    def _count_end(self, seq: Sequence, times: SequenceTimes, now: float) -> None:
        """Count an ended completion. Events that an error prevented count as happening now: no time is negative or missing."""
        histograms, arrival = self.times, seq.request.arrival_time
        assert arrival is not None
        start = now if times.started is None else times.started
        first = now if times.first_token is None else times.first_token
        last = now if times.last_token is None else times.last_token
        num_prompt, num_generated = seq.num_prompt_tokens, len(seq.token_ids) - seq.num_prompt_tokens
        histograms.latency.observe(now - arrival)
        histograms.queue_time.observe(start - arrival)
        histograms.prefill_time.observe(first - start)
        histograms.decode_time.observe(last - first)
        histograms.inference_time.observe(last - start)
        histograms.time_per_token.observe((last - first) / (num_generated - 1) if num_generated > 1 else 0.0)
        histograms.prompt_length.observe(num_prompt)
        histograms.computed_prompt_length.observe(num_prompt - (seq.num_cached_tokens or 0))
        histograms.generated_length.observe(num_generated)
        most = seq.params.max_tokens
        histograms.max_tokens.observe(seq.max_num_tokens - num_prompt if most is None else most)
        histograms.num_preemptions.observe(seq.num_preemptions)

    # ---- snapshots

    def snapshot(self, engine: LLMEngine) -> EngineMetrics:
        """A copy of all counters. Called between two steps, in the engine's thread."""
        scheduler, blocks = engine.scheduler, engine.scheduler.blocks
        self._flush()
        self.cache.num_evicted_blocks = self.events.num_evicted
        num_fetching = len(self.fetching())
        return EngineMetrics(
            steps=deepcopy(self.steps),
            times=deepcopy(self.times),
            cache=deepcopy(self.cache),
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
            num_requests=self.num_requests,
            finished=dict(self.finished_by_reason),
            num_listener_errors=self.events.num_errors,
            **{name: deepcopy(self.sources[name]()) for name in ("speculation", "offload") if name in self.sources},
        )

    def snapshots(self, engine: LLMEngine, *, summed: bool = False) -> dict[str, EngineMetrics]:
        """Snapshots by the names of engines: here is one engine, "0". `summed`: their sum, "all"."""
        return {"all" if summed else "0": self.snapshot(engine)}

    def fetching(self) -> Collection[Sequence]:
        """Waiting sequences whose K/V are read from files."""
        sequences: Collection[Sequence] = self.sources.get("fetching", tuple)()
        return sequences

    def progress(self, engine: LLMEngine, before: EngineStats) -> str:
        """The state of the engine, and its rates since `before`, for a progress bar."""
        stats, scheduler = self.steps.since(before), engine.scheduler
        return (
            f"prefill {stats.prefill_rate:.0f} tok/s, decode {stats.decode_rate:.0f} tok/s, "
            f"KV {kv_usage(scheduler.blocks):.0%}, running {len(scheduler.running)}, waiting {len(scheduler.waiting)}"
        )


def _metrics_of_finished(request: Request) -> RequestMetrics:
    """The metrics of a request whose completions have all ended."""
    num_preemptions = sum(seq.num_preemptions for seq in request.sequences)
    times = [seq.state[TIMES] for seq in request.sequences]
    starts = [each.first_token for each in times if each.first_token is not None]
    if not starts or request.arrival_time is None:
        return RequestMetrics(num_preemptions=num_preemptions)
    first, last = min(starts), max(each.last_token for each in times if each.last_token is not None)
    longest = _longest(request)
    return RequestMetrics(
        ttft=first - request.arrival_time,
        tpot=(last - first) / (longest - 1) if longest > 1 else None,
        latency=last - request.arrival_time,
        num_preemptions=num_preemptions,
    )


def _longest(request: Request) -> int:
    """Tokens of the longest completion of a request."""
    return max(len(seq.token_ids) - seq.num_prompt_tokens for seq in request.sequences)


def kv_usage(blocks: BlockManager) -> float:
    """Used part of the KV pool, 0 to 1."""
    return 1 - blocks.num_free / blocks.num_blocks
