"""What is counted: steps, the prefix cache, times and lengths of requests; and `EngineMetrics`, all of it at one moment.

What is measured of requests, when, and between which bounds follows vLLM 0.33 (vllm/v1/metrics/stats.py, loggers.py and
buckets.py), so that its dashboards can be used. As there, each completion of a request counts as a request of its own, unless it
says otherwise.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any

from nanoengine.core.outputs import FinishReason
from nanoengine.counts import Counts
from nanoengine.features.observability.histogram import (
    FIRST_TOKEN_BOUNDS,
    LATENCY_BOUNDS,
    NUM_COMPLETIONS_BOUNDS,
    NUM_PREEMPTIONS_BOUNDS,
    STEP_BOUNDS,
    TOKEN_BOUNDS,
    Histogram,
    length_bounds,
)


@dataclass(slots=True)
class EngineStats(Counts):
    """Totals over the engine's life. Times in seconds; tokens are those computed, so prefix hits are not among them, nor are
    rejected drafts, nor samples of sequences that had ended before.

    The time of a step that computes prompts and decodes is shared out by their tokens.
    """

    prefill_tokens: int = 0
    prefill_time: float = 0.0
    decode_tokens: int = 0
    decode_time: float = 0.0
    num_prefill_steps: int = 0
    num_mixed_steps: int = 0
    num_decode_steps: int = 0

    def record(self, num_prompt: int, num_decode: int, num_generated: int, seconds: float) -> None:
        """Count a step.

        Args:
            num_prompt: tokens of prompts that it computed.
            num_decode: other tokens that it computed, drafts included.
            num_generated: tokens that its decodes brought.
        """
        if not num_prompt + num_decode:
            return
        share = num_decode / (num_prompt + num_decode)
        self.decode_tokens += num_generated
        self.decode_time += share * seconds
        self.prefill_tokens += num_prompt
        self.prefill_time += (1 - share) * seconds
        if not num_prompt:
            self.num_decode_steps += 1
        elif num_decode:
            self.num_mixed_steps += 1
        else:
            self.num_prefill_steps += 1

    def since(self, before: EngineStats) -> EngineStats:
        """What was counted after the copy `before` was made."""
        return EngineStats(*(getattr(self, own.name) - getattr(before, own.name) for own in fields(self)))

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens computed per second of prefill steps."""
        return self.prefill_tokens / self.prefill_time if self.prefill_time else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens generated per second of decode steps."""
        return self.decode_tokens / self.decode_time if self.decode_time else 0.0


@dataclass(slots=True)
class CacheStats(Counts):
    """Tokens looked up and found. A request counts once, when it is first admitted; when it resumes, it counts apart.

    A request that does not look, because caching is off or because all of its prompt must be computed, does not count.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_resumed_queried_tokens: int = 0
    num_resumed_hit_tokens: int = 0
    num_evicted_blocks: int = 0  # cached blocks of the pool that were taken for others; a lower tier may have kept them

    def record(self, num_queried: int, num_hit: int, *, resumed: bool) -> None:
        if resumed:
            self.num_resumed_queried_tokens += num_queried
            self.num_resumed_hit_tokens += num_hit
        else:
            self.num_queried_tokens += num_queried
            self.num_hit_tokens += num_hit

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens of all requests that the cache had; None if nobody has asked."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else None


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


class RequestTimes:
    """Histograms over the engine's life, and totals of tokens beside them. Times are seconds.

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

    def __add__(self, other: RequestTimes) -> RequestTimes:
        """The counts of two engines of one `max_model_len`."""
        total = copy(self)
        for name, value in vars(other).items():
            setattr(total, name, getattr(self, name) + value)
        return total


@dataclass(frozen=True, slots=True)
class EngineMetrics(Counts):
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
    finished: dict[FinishReason, int]  # completions by why they ended
    num_listener_errors: int  # of the listener of KV events
    speculation: Any = None  # the statistics of capabilities, where they are there
    offload: Any = None

    def __add__(self, other: EngineMetrics) -> EngineMetrics:
        """The counters of two engines with the same options."""
        num_blocks = self.num_blocks + other.num_blocks
        num_used = self.kv_usage * self.num_blocks + other.kv_usage * other.num_blocks
        total = Counts.__add__(self, other)
        usage = num_used / num_blocks if num_blocks else 0.0
        return replace(total, kv_usage=usage, block_size=self.block_size, max_model_len=self.max_model_len)

    def of_the_past(self) -> EngineMetrics:
        """What an engine that has ended has counted: totals stay, and nothing waits, runs, or has blocks any more."""
        return replace(
            self,
            num_waiting=0,
            num_fetching=0,
            num_running=0,
            num_in_flight=0,
            kv_usage=0.0,
            num_blocks=0,
            max_concurrency=0.0,
        )
