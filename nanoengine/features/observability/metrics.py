"""Statistics of steps, of the prefix cache, of times and lengths of requests; and `EngineMetrics`, all of them at one moment.

Names, meanings, moments of measurement and bounds follow vLLM 0.33 (vllm/v1/metrics/stats.py, loggers.py and buckets.py), so that
its dashboards can be used. As there, each completion of a request counts as a request, unless the text says otherwise. A metric
that vLLM does not have begins with "nanoengine:".
"""

# ruff: noqa: RUF009  (`metric` makes fields)

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self

from nanoengine.core.outputs import FinishReason
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
from nanoengine.features.statistics import Statistics, metric

first_token, gaps = partial(metric, bounds=FIRST_TOKEN_BOUNDS), partial(metric, bounds=TOKEN_BOUNDS)
seconds, lengths = partial(metric, bounds=LATENCY_BOUNDS), partial(metric, bounds=None)
"""Kinds of histograms."""

step_seconds = partial(metric, "nanoengine:step_seconds", "Time of steps, shared out by their tokens.")
WAITING = "Sequences that wait to run: for room, or deferred until their K/V were read from files."
waiting = partial(metric, "vllm:num_requests_waiting_by_reason", WAITING, is_gauge=True)


@dataclass(slots=True)
class EngineStats(Statistics):
    """Totals of steps over the engine's life. Times in seconds. Tokens are computed ones: without prefix hits, rejected
    drafts, and samples of sequences that had ended before.

    The time of a step that computes prompts and decodes is divided by their tokens.
    """

    prefill_tokens: int = 0
    prefill_time: float = step_seconds(labels={"phase": "prefill"})
    decode_tokens: int = 0
    decode_time: float = step_seconds(labels={"phase": "decode"})
    num_prefill_steps: int = 0
    num_mixed_steps: int = 0
    num_decode_steps: int = 0

    def record(self, num_prompt: int, num_decode: int, num_generated: int, seconds: float) -> None:
        """Count a step.

        Args:
            num_prompt: tokens of prompts that it computed.
            num_decode: other tokens that it computed, drafts included.
            num_generated: new tokens of its decodes.
        """
        if not num_prompt + num_decode:
            return
        decode_part = num_decode / (num_prompt + num_decode)
        self.decode_tokens += num_generated
        self.decode_time += decode_part * seconds
        self.prefill_tokens += num_prompt
        self.prefill_time += (1 - decode_part) * seconds
        if not num_prompt:
            self.num_decode_steps += 1
        elif num_decode:
            self.num_mixed_steps += 1
        else:
            self.num_prefill_steps += 1

    def since(self, before: EngineStats) -> EngineStats:
        """The difference to an earlier copy."""
        return EngineStats(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens computed per second of prefill steps."""
        return self.prefill_tokens / self.prefill_time if self.prefill_time else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens generated per second of decode steps."""
        return self.decode_tokens / self.decode_time if self.decode_time else 0.0


@dataclass(slots=True)
class CacheStats(Statistics):
    """Tokens of look-ups in the prefix cache, and of hits. A request counts once, when it is first admitted; when it resumes, it
    counts apart.

    A request without a look-up, because caching is off or because all of its prompt must be computed, does not count.
    """

    num_queried_tokens: int = metric("vllm:prefix_cache_queries", "Tokens looked up in the cache.")
    num_hit_tokens: int = metric("vllm:prefix_cache_hits", "Tokens found there, in any tier.")
    num_resumed_queried_tokens: int = 0
    num_resumed_hit_tokens: int = 0
    num_evicted_blocks: int = 0  # cached blocks of the pool that were overwritten; a lower tier may have a copy

    def record(self, num_queried: int, num_hit: int, *, resumed: bool) -> None:
        if resumed:
            self.num_resumed_queried_tokens += num_queried
            self.num_resumed_hit_tokens += num_hit
        else:
            self.num_queried_tokens += num_queried
            self.num_hit_tokens += num_hit

    @property
    def hit_rate(self) -> float | None:
        """Hits per look-up, in tokens of prompts, 0 to 1; None without a look-up."""
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


@dataclass(slots=True, kw_only=True)
class RequestTimes(Statistics):
    """Histograms over the engine's life, and totals of tokens beside them. Times are seconds.

    Aborted requests are in no histogram of ended requests; their tokens and the times of these stay.
    """

    # when a first token comes
    num_prompt_tokens: int = metric("vllm:prompt_tokens", "Tokens of prompts, cached ones included.")
    num_cached_prompt_tokens: int = metric("vllm:prompt_tokens_cached", "Tokens of prompts that were not computed.")
    time_to_first_token: Histogram = first_token("vllm:time_to_first_token_seconds", "From arrival to the first token.")
    # in each step
    num_generated_tokens: int = metric("vllm:generation_tokens", "Tokens generated.")
    inter_token_latency: Histogram = gaps("vllm:inter_token_latency_seconds", "Between the steps that brought tokens.")
    tokens_of_step: Histogram = metric("vllm:iteration_tokens_total", "Tokens of a step.", bounds=STEP_BOUNDS)
    # when a completion ends; the times include preemptions
    latency: Histogram = seconds("vllm:e2e_request_latency_seconds", "From arrival to the end.")
    queue_time: Histogram = seconds("vllm:request_queue_time_seconds", "From arrival to the first step.")
    prefill_time: Histogram = seconds("vllm:request_prefill_time_seconds", "From the first step to the first token.")
    decode_time: Histogram = seconds("vllm:request_decode_time_seconds", "From the first token to the last.")
    inference_time: Histogram = seconds("vllm:request_inference_time_seconds", "From the first step to the last token.")
    time_per_token: Histogram = gaps("vllm:request_time_per_output_token_seconds", "Mean per token after the first.")
    prompt_length: Histogram = lengths("vllm:request_prompt_tokens", "Tokens of a prompt.")
    computed_prompt_length: Histogram = lengths("vllm:request_prefill_kv_computed_tokens", "Uncached prompt tokens.")
    generated_length: Histogram = lengths("vllm:request_generation_tokens", "Tokens generated for a sequence.")
    max_tokens: Histogram = lengths("vllm:request_params_max_tokens", "max_tokens of a request.")
    num_preemptions: Histogram = metric("vllm:request_num_preemptions", "Preemptions.", bounds=NUM_PREEMPTIONS_BOUNDS)
    # when all completions of a request have ended
    num_completions: Histogram = metric("vllm:request_params_n", "n of a request.", bounds=NUM_COMPLETIONS_BOUNDS)
    longest_generated: Histogram = lengths("vllm:request_max_num_generation_tokens", "Tokens of the longest sequence.")

    @classmethod
    def new(cls, max_model_len: int) -> Self:
        """Histograms without values, for an engine with sequences of at most `max_model_len` tokens."""
        bounds = {each.name: each.metadata["bounds"] for each in fields(cls) if "bounds" in each.metadata}
        of_lengths = length_bounds(max_model_len)
        return cls(**{name: Histogram(fixed or of_lengths) for name, fixed in bounds.items()})  # type: ignore[arg-type]


MOMENTARY = ("num_waiting", "num_fetching", "num_running", "num_in_flight", "kv_usage", "num_blocks", "max_concurrency")
"""Fields of `EngineMetrics` that are 0 for an engine that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics(Statistics):
    """All counters at one moment. Counts are totals over the engine's life but for `num_waiting` to `max_concurrency`."""

    steps: EngineStats
    times: RequestTimes
    cache: CacheStats
    num_waiting: int = waiting(labels={"reason": "capacity"})
    num_fetching: int = waiting(labels={"reason": "deferred"})
    num_running: int = metric("vllm:num_requests_running", "Sequences that have blocks and a row.", is_gauge=True)
    num_in_flight: int  # steps
    kv_usage: float = metric("vllm:kv_cache_usage_perc", "Used part of the KV pool, 0 to 1.", is_gauge=True)
    num_blocks: int  # of the KV pool
    block_size: int  # tokens
    max_model_len: int
    max_concurrency: float  # capacity of the pool in longest sequences
    num_preemptions: int = metric("vllm:num_preemptions", "Times that a sequence was preempted.")
    num_requests: int  # submitted
    finished: dict[FinishReason, int]  # ended completions by reason
    num_listener_errors: int  # of the listener of KV events
    speculation: Any = None  # statistics of this capability, if it is used; so is offload
    offload: Any = None

    def __add__(self, other: EngineMetrics) -> EngineMetrics:
        """The counters of two engines with the same options."""
        num_blocks = self.num_blocks + other.num_blocks
        num_used = self.kv_usage * self.num_blocks + other.kv_usage * other.num_blocks
        total = Statistics.__add__(self, other)
        usage = num_used / num_blocks if num_blocks else 0.0
        return replace(total, kv_usage=usage, block_size=self.block_size, max_model_len=self.max_model_len)

    def after_end(self) -> EngineMetrics:
        """The metrics of an engine that has ended: totals stay, and nothing waits, runs, or has blocks any more."""
        zeros: dict[str, Any] = dict.fromkeys(MOMENTARY, 0)
        return replace(self, **zeros)
