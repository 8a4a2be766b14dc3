"""What comes back from the engine: results, with their metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token in the model's own distribution, and its rank there (1 is the likeliest)."""

    logprob: float
    rank: int


TokenLogprobs = dict[int, TokenLogprob]
"""Token id -> logprob, at one position: the token that stands there and the likeliest ones that were asked for."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    `token_ids` holds every token that was generated, the stopping one included; `text` ends before the stop,
    unless the params include it.
    `finish_reason` is None while it runs. `stop_reason` is the stop string or stop token id that ended it, None for the
    model's own end of text. `logprobs` has one entry per token, if they were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    cumulative_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


@dataclass(slots=True)
class Delta:
    """What is new of one completion: it goes on where the delta before ends. `finish_reason` comes with the last."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds. TTFT: from arrival to the first token. TPOT: mean time per output token after the first.

    With several completions, TTFT is that of the earliest token and TPOT that of the longest completion.
    """

    ttft: float | None
    tpot: float | None
    latency: float | None
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Result of one request: its prompt, its completions, how much of the prompt came from the prefix cache.

    `prompt_logprobs` has one entry per token of the prompt, if they were asked for; the first is None, as nothing predicts it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)
