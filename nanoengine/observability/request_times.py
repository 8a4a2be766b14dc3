"""RequestTimes: how long requests wait, compute and answer, and how long they are, as histograms over the engine's life.

What is measured, when, and between which bounds follows vLLM 0.33 (vllm/v1/metrics/stats.py, loggers.py and buckets.py), so that
its dashboards can be used. As there, each completion of a request counts as a request of its own, unless it says otherwise.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from nanoengine.core.sequence import Request, Sequence
from nanoengine.observability.histogram import (
    FIRST_TOKEN_BOUNDS,
    LATENCY_BOUNDS,
    NUM_COMPLETIONS_BOUNDS,
    NUM_PREEMPTIONS_BOUNDS,
    STEP_BOUNDS,
    TOKEN_BOUNDS,
    Histogram,
    length_bounds,
)

TIMES = "observability.times"
"""The `SequenceTimes` of a sequence, in `Sequence.state`."""


@dataclass(slots=True)
class SequenceTimes:
    """When things happened to one sequence, in seconds of the observer's clock, and how many of its tokens were counted."""

    num_counted: int = 0  # output tokens
    started: float | None = None  # the first time
    first_token: float | None = None
    last_token: float | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds. TTFT: from arrival to the first token. TPOT: mean time per output token after the first.

    With several completions, TTFT is that of the earliest token and TPOT that of the longest completion. Until a request ends,
    only its TTFT is known.
    """

    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None
    num_preemptions: int = 0


def metrics_of_finished(request: Request) -> RequestMetrics:
    """Of a request all of whose completions have ended."""
    num_preemptions = sum(seq.num_preemptions for seq in request.sequences)
    times = [seq.state[TIMES] for seq in request.sequences]
    starts = [own.first_token for own in times if own.first_token is not None]
    if not starts or request.arrival_time is None:
        return RequestMetrics(num_preemptions=num_preemptions)
    first, last = min(starts), max(own.last_token for own in times if own.last_token is not None)
    longest = max(len(seq.token_ids) - seq.num_prompt_tokens for seq in request.sequences)
    return RequestMetrics(
        ttft=first - request.arrival_time,
        tpot=(last - first) / (longest - 1) if longest > 1 else None,
        latency=last - request.arrival_time,
        num_preemptions=num_preemptions,
    )


class RequestTimes:
    """The histograms, and totals of tokens beside them. Times are seconds.

    Aborted requests are in no histogram of ended requests; their tokens and the times of these stay.

    Args:
        max_model_len: longest sequence in tokens.
    """

    def __init__(self, max_model_len: int):
        lengths = length_bounds(max_model_len)
        self.num_prompt_tokens = 0  # of all whose first token came
        self.num_cached_prompt_tokens = 0  # of them, those that were not computed
        self.num_generated_tokens = 0
        # as they come
        self.time_to_first_token = Histogram(FIRST_TOKEN_BOUNDS)  # from arrival
        self.inter_token_latency = Histogram(TOKEN_BOUNDS)  # between steps that brought tokens, however many
        self.tokens_of_step = Histogram(STEP_BOUNDS)  # prompt tokens computed, and tokens generated
        # of each that has ended
        self.latency = Histogram(LATENCY_BOUNDS)  # from arrival to the end
        self.queue_time = Histogram(LATENCY_BOUNDS)  # from arrival until it was first started
        self.prefill_time = Histogram(LATENCY_BOUNDS)  # from there to the first token
        self.decode_time = Histogram(LATENCY_BOUNDS)  # from there to the last; preemptions are in all three
        self.inference_time = Histogram(LATENCY_BOUNDS)  # the last two together
        self.time_per_token = Histogram(TOKEN_BOUNDS)  # after the first; 0 for a single one
        self.prompt_length = Histogram(lengths)
        self.computed_prompt_length = Histogram(lengths)  # without what the prefix cache had
        self.generated_length = Histogram(lengths)
        self.max_tokens = Histogram(lengths)  # asked for
        self.num_preemptions = Histogram(NUM_PREEMPTIONS_BOUNDS)
        # of each request all of whose completions have ended
        self.num_completions = Histogram(NUM_COMPLETIONS_BOUNDS)  # asked for
        self.longest_generated = Histogram(lengths)

    def snapshot(self) -> RequestTimes:
        """A copy that does not change any more."""
        other = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Histogram):
                setattr(other, name, value.copy())
        return other

    def note_first_token(self, seq: Sequence, arrival: float, now: float) -> None:
        self.time_to_first_token.observe(now - arrival)
        self.num_prompt_tokens += seq.num_prompt_tokens
        self.num_cached_prompt_tokens += seq.num_cached_tokens or 0

    def note_step(self, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        """A step has ended: how many tokens of prompts it computed, and how many it brought."""
        self.num_generated_tokens += num_generated_tokens
        if num_prompt_tokens or num_generated_tokens:
            self.tokens_of_step.observe(num_prompt_tokens + num_generated_tokens)

    def note_end(self, seq: Sequence, arrival: float, now: float) -> None:
        """A completion has ended. Events that an error prevented count as happening now: no time is negative or missing."""
        times: SequenceTimes = seq.state[TIMES]
        start = now if times.started is None else times.started
        first = now if times.first_token is None else times.first_token
        last = now if times.last_token is None else times.last_token
        num_prompt, num_generated = seq.num_prompt_tokens, len(seq.token_ids) - seq.num_prompt_tokens
        self.latency.observe(now - arrival)
        self.queue_time.observe(start - arrival)
        self.prefill_time.observe(first - start)
        self.decode_time.observe(last - first)
        self.inference_time.observe(last - start)
        self.time_per_token.observe((last - first) / (num_generated - 1) if num_generated > 1 else 0.0)
        self.prompt_length.observe(num_prompt)
        self.computed_prompt_length.observe(num_prompt - (seq.num_cached_tokens or 0))
        self.generated_length.observe(num_generated)
        asked = seq.params.max_tokens
        self.max_tokens.observe(seq.max_num_tokens - num_prompt if asked is None else asked)
        self.num_preemptions.observe(seq.num_preemptions)

    def note_request_end(self, request: Request) -> None:
        """All completions of a request have ended. If one was aborted, nothing is noted."""
        if any(seq.finish_reason == "abort" for seq in request.sequences):
            return
        self.num_completions.observe(request.params.n)
        self.longest_generated.observe(max(len(seq.token_ids) - seq.num_prompt_tokens for seq in request.sequences))
