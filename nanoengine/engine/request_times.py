"""RequestTimes: how long requests wait, compute and answer, and how long they are, as histograms over the engine's life.

What is measured, when, and between which bounds follows vLLM 0.33 (vllm/v1/metrics/stats.py, loggers.py and buckets.py), so that
its dashboards can be used. As there, each completion of a request counts as a request of its own, unless it says otherwise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from copy import copy
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoengine.engine.request import Completion, Request
    from nanoengine.engine.sequence import Sequence

# Values and bounds are of one type, seconds floats and tokens whole numbers: bisect compares those faster.
LATENCY_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_COMPLETIONS_BOUNDS = (1, 2, 5, 10, 20)
NUM_PREEMPTIONS_BOUNDS = (1, 2, 3, 4, 5, 10, 20)


def length_bounds(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 and so on, up to the longest sequence in tokens."""
    scales = (10**exponent for exponent in range(len(str(max_model_len))))
    return tuple(digit * scale for scale in scales for digit in (1, 2, 5) if digit * scale <= max_model_len)


class Histogram:
    """How many values fell into each of some buckets, and their sum.

    Args:
        bounds: ascending. A bucket holds the values above the bound before its own and up to its own; one more holds the rest.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Seq[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[int]:
        """How many values were up to each bound; at last, all of them."""
        return list(accumulate(self.counts))

    def copy(self) -> Histogram:
        other = copy(self)
        other.counts = self.counts.copy()
        return other


class RequestTimes:
    """The histograms, and totals of tokens beside them. Times are seconds.

    What a client gave up (finish reason "abort") is in no histogram of ended requests; its tokens and their times stay.

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
        """A copy that changes no more."""
        other = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Histogram):
                setattr(other, name, value.copy())
        return other

    def note_first_token(self, request: Request, seq: Sequence, now: float) -> None:
        self.time_to_first_token.observe(now - request.arrival_time)
        self.num_prompt_tokens += seq.num_prompt_tokens
        self.num_cached_prompt_tokens += seq.num_cached_tokens or 0

    def note_step(self, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        """A step has come to its end: how many tokens of prompts it computed, and how many it brought."""
        self.num_generated_tokens += num_generated_tokens
        if num_prompt_tokens or num_generated_tokens:
            self.tokens_of_step.observe(num_prompt_tokens + num_generated_tokens)

    def note_end(self, request: Request, completion: Completion, now: float) -> None:
        """A completion has ended. What an error kept from coming counts as come at its end: no time is negative or missing."""
        seq = completion.seq
        start = now if completion.scheduled_time is None else completion.scheduled_time
        first = now if completion.first_token_time is None else completion.first_token_time
        last = now if completion.last_token_time is None else completion.last_token_time
        num_prompt, num_generated = seq.num_prompt_tokens, seq.num_output_tokens
        self.latency.observe(now - request.arrival_time)
        self.queue_time.observe(start - request.arrival_time)
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
        """All completions of a request have ended. Where one was aborted, nothing is noted."""
        longest = 0
        for completion in request.completions:
            if completion.seq.finish_reason == "abort":
                return
            longest = max(longest, completion.seq.num_output_tokens)
        self.num_completions.observe(request.params.n)
        self.longest_generated.observe(longest)
