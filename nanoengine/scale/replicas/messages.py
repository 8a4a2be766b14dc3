"""Messages between the front and its replicas. Plain data, which is pickled.

The front sends Submit, Abort, SetAdapters, Ping, ResetPrefixCache and End. A replica sends Pong while it starts, then Ready once,
and then StepUpdate and Pong; Failed is its last message. A replica that sends a message at another time is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nanoengine.core.outputs import FinishReason
from nanoengine.core.sampling_params import CoreSamplingParams

KVChange = tuple[bytes | None, bool]
"""(hash of a block, whether it can be hit from now on); (None, False): the cache is empty."""


@dataclass(frozen=True, slots=True)
class Resumable:
    """The state of a request, from which any engine can go on: tokens, texts and log probabilities are as if one engine had
    computed all.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: CoreSamplingParams  # checked, with a seed
    completions: dict[int, list[int]]  # by index, the tokens so far of each completion that has not ended
    num_chars: dict[int, int]  # by index, the length of the text of these tokens
    cache_salt: str = ""
    priority: int = 0
    client: str = ""
    age: float | None = None  # seconds since it arrived


# ---- to a replica


class Submit(NamedTuple):
    """A request to compute."""

    key: int  # of this attempt; its deltas have the same key
    resumable: Resumable
    adapter: str | None = None  # digest of an adapter of an earlier `SetAdapters`


class Abort(NamedTuple):
    """End of a request that was submitted under this key."""

    key: int


class SetAdapters(NamedTuple):
    """New LoRA adapters, sent before the first request that needs them, and the digests of old ones."""

    adapters: Mapping[str, Any]  # by digest
    drops: Collection[str]  # digests of adapters that no request uses any more


class Ping(NamedTuple):
    """Request for a `Pong`, and for the counters after the current step."""


class ResetPrefixCache(NamedTuple):
    """Order to empty the prefix cache."""


class End(NamedTuple):
    """Order to close the engine, and to end the process."""


# ---- from a replica


@dataclass(frozen=True, slots=True)
class Ready:
    """Sent once the engine of a replica is built. Replicas of equal `identity` compute equal numbers."""

    max_model_len: int
    hash_seed: int  # of its prefix cache
    identity: str


class Failed(NamedTuple):
    """Last message of a replica that could not start, or has lost a rank."""

    error: Exception


class Finish(NamedTuple):
    """End of a completion."""

    reason: FinishReason
    stop_reason: str | int | None = None
    error: Exception | None = None
    embedding: Any = None
    metrics: Any = None  # of the request, with its last completion


class CompletionDelta(NamedTuple):
    """New tokens of one completion, or its end."""

    key: int
    completion: int  # its index
    first_token: int  # index of the first of these tokens in the completion
    token_ids: list[int]
    text: str
    logprobs: list[Any] | None
    num_cached_tokens: int
    finish: Finish | None


@dataclass(slots=True)
class StepUpdate:
    """Results of a step of a replica.

    Attributes:
        deltas: new tokens of completions.
        changes: changes of the prefix cache, which is empty at first.
        prompt_logprobs: of whole prompts, by key.
        metrics: counters of the engine and its view, after a `Ping`.
    """

    deltas: list[CompletionDelta] = field(default_factory=list)
    changes: list[KVChange] = field(default_factory=list)
    prompt_logprobs: dict[int, list[Any]] = field(default_factory=dict)
    metrics: Any = None


class Pong(NamedTuple):
    """A sign of life."""

    seconds_in_step: float  # time since the current step began
