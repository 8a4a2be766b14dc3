"""Observer: counts what happens in an engine, in one place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from time import perf_counter

from nanoengine.core.messages import StepResult
from nanoengine.core.outputs import FinishReason
from nanoengine.core.scheduler import Step
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Request, Sequence
from nanoengine.observability.cache_stats import CacheStats
from nanoengine.observability.request_times import (
    TIMES,
    RequestMetrics,
    RequestTimes,
    SequenceTimes,
    metrics_of_finished,
)
from nanoengine.observability.step_stats import EngineStats


class Observer(PolicyPart):
    """Sees when steps begin and end, and when requests do.

    Args:
        max_model_len: longest sequence in tokens.
        enable_prefix_caching: whether sequences look for prefixes of others.
        clock: seconds; that of `Request.arrival_time`.
    """

    def __init__(
        self, max_model_len: int, *, enable_prefix_caching: bool = True, clock: Callable[[], float] = perf_counter
    ):
        self.enable_prefix_caching, self.clock = enable_prefix_caching, clock
        self.steps, self.cache, self.times = EngineStats(), CacheStats(), RequestTimes(max_model_len)
        self.finished_by_reason: Counter[FinishReason] = Counter()
        self.num_requests = 0
        self._starts: dict[int, float] = {}  # of the steps in flight, by their numbers
        self._last_end = float("-inf")
        self._last_step = (0, 0)  # prompt tokens and generated tokens of the last step, which are not in `times` yet

    # ---- as a part of plans

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

    # ---- as a listener

    def submitted(self, request: Request) -> None:
        if request.arrival_time is None:
            request.arrival_time = self.clock()
        request.metrics = RequestMetrics()
        self.num_requests += 1
        for seq in request.sequences:
            seq.state[TIMES] = SequenceTimes()

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        now, start = self.clock(), self._starts.pop(step.number)
        seconds, self._last_end = now - max(start, self._last_end), now
        if isinstance(result, BaseException) or step.is_dropped:
            return
        self.flush()
        chunks = {seq: run.num_new for seq, run in zip(step.runs, step.plan.runs, strict=True) if not run.drafts}
        num_generated = num_of_decodes = 0
        gaps: Counter[float] = Counter()  # by when the token before came: mostly in the step before, for all
        for seq in seqs:
            times: SequenceTimes = seq.state[TIMES]
            num_new = len(seq.token_ids) - seq.num_prompt_tokens - times.num_counted
            if not num_new:
                continue
            times.num_counted += num_new
            num_generated += num_new
            if seq not in chunks:
                num_of_decodes += num_new
            if times.last_token is None:
                self._first_token(seq, times, now)
            else:
                gaps[times.last_token] += 1
            times.last_token = now
        for last, count in gaps.items():
            self.times.inter_token_latency.observe(now - last, count)
        num_prompt = sum(chunks.values())
        self.steps.record(num_prompt, step.plan.num_tokens - num_prompt, num_of_decodes, seconds)
        self._last_step = num_prompt, num_generated

    def _first_token(self, seq: Sequence, times: SequenceTimes, now: float) -> None:
        request = seq.request
        assert request.arrival_time is not None
        times.first_token = now
        self.times.note_first_token(seq, request.arrival_time, now)
        if request.metrics.ttft is None:
            request.metrics = RequestMetrics(ttft=now - request.arrival_time)

    def finished(self, seq: Sequence) -> None:
        now, times, request = self.clock(), seq.state[TIMES], seq.request
        assert request.arrival_time is not None
        # Tokens behind a stop string were accepted drafts of the last step. They are dropped when its text is made.
        num_dropped = times.num_counted - (len(seq.token_ids) - seq.num_prompt_tokens)
        if num_dropped:
            self.steps.decode_tokens -= num_dropped
            self._last_step = self._last_step[0], self._last_step[1] - num_dropped
        if seq.finish_reason is not None:
            self.finished_by_reason[seq.finish_reason] += 1
            if seq.finish_reason != "abort":
                self.times.note_end(seq, request.arrival_time, now)
        if request.finished:
            request.metrics = metrics_of_finished(request)
            self.times.note_request_end(request)

    def flush(self) -> None:
        """Count the last step: all its texts are made."""
        self.times.note_step(*self._last_step)
        self._last_step = 0, 0
