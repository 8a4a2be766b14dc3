"""Messages between the front and its replicas. Plain data, which is pickled.

The front sends Submit, Abort, Equip, Ping, Forget and End. A replica sends Pong while it starts, then Ready once, and then News
and Pong; Failed is its last message. A replica that sends a message at another time is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nanoengine.core.outputs import FinishReason
from nanoengine.core.sampling_params import CoreSamplingParams

KVChange = tuple[bytes | None, bool]
"""(hash of a block, whether it can be hit from now on); (None, False): nothing is cached any more."""


@dataclass(frozen=True, slots=True)
class Resumable:
    """The state of a request, with which any engine can go on: tokens, texts and log probabilities are those of an engine that
    computes all of it.
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
    key: int  # of this attempt; deltas of it have the same key
    resumable: Resumable
    adapter: str | None = None  # digest of an adapter that an `Equip` has brought


class Abort(NamedTuple):
    key: int


class Equip(NamedTuple):
    """LoRA adapters, sent before the first request that needs them."""

    adapters: Mapping[str, Any]  # by digest
    drops: Collection[str]  # digests of adapters that no request needs any more


class Ping(NamedTuple):
    wants_metrics: bool  # the counters are sent after the current step


class Forget(NamedTuple):
    """Empty the prefix cache."""


class End(NamedTuple):
    """Close the engine, and end."""


# ---- from a replica


@dataclass(frozen=True, slots=True)
class Ready:
    """A replica has its engine. Replicas of the same `identity` compute the same numbers."""

    max_model_len: int
    hash_seed: int  # of its prefix cache
    identity: str


class Failed(NamedTuple):
    """A replica could not start, or has lost a rank: it ends."""

    error: Exception


class Finish(NamedTuple):
    """How a completion ended."""

    reason: FinishReason
    stop_reason: str | int | None
    error: Exception | None
    embedding: Any
    metrics: Any  # of the request, when its last completion has ended


class Delta(NamedTuple):
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
class News:
    """Results of a step.

    Attributes:
        deltas: new tokens of completions.
        changes: changes of the prefix cache, which is empty at first.
        prompt_logprobs: by key, once all log probabilities of a prompt are known.
        metrics: counters of the engine and its view, if a `Ping` wanted them.
    """

    deltas: list[Delta] = field(default_factory=list)
    changes: list[KVChange] = field(default_factory=list)
    prompt_logprobs: dict[int, list[Any]] = field(default_factory=dict)
    metrics: Any = None


class Pong(NamedTuple):
    """A sign of life."""

    seconds_in_step: float  # that the current step has taken so far
