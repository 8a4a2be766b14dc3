"""The outputs of the engine: requests and their completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    `token_ids` holds every token that was generated, the stopping one included; `text` ends before the stop, unless the params
    include it. `finish_reason` is None while it runs. `stop_reason` is the stop string or stop token id that ended it, or
    "repeated call", None for an end-of-text token. `logprobs` has one entry per token, and `cumulative_logprob` their
    sum, if requested.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    logprobs: list[Any] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Result of one request: prompt, completions, cached prompt tokens; metrics and prompt log probabilities, if collected."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: Any = None
    prompt_logprobs: list[Any] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)
