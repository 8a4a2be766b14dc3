"""What the front and its replicas say to each other. Plain data: it pickles.

The front says Submit, Abort, Equip, Ping, TellCached, Forget and End. A replica says Pong while it starts, then Ready or Failed
once, and then News and Pong. What it says at another time ends it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nanoengine.core.outputs import FinishReason
from nanoengine.core.sampling_params import SamplingParams

KVChange = tuple[bytes | None, bool]
"""(hash of a block, whether it can be hit from now on); (None, False): nothing is cached any more."""


@dataclass(frozen=True, slots=True)
class Resumable:
    """All that an engine needs to go on with a request, wherever it began: it gets the tokens, texts and log probabilities that
    it would have got there.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams  # checked, with a seed
    completions: dict[int, list[int]]  # those that go on: the tokens that each has so far
    num_chars: dict[int, int]  # of the text of these tokens
    cache_salt: str = ""
    priority: int = 0
    client: str = ""
    age: float | None = None  # seconds since it arrived


# ---- to a replica


class Submit(NamedTuple):
    key: int  # of this attempt: what comes of it has the same
    resumable: Resumable
    adapter: str | None = None  # digest of one that an `Equip` has brought


class Abort(NamedTuple):
    key: int


class Equip(NamedTuple):
    """What requests need beside themselves: said before the first that needs it."""

    adapters: Mapping[str, Any]  # by digest
    drops: Collection[str]  # digests of those that nobody needs any more


class Ping(NamedTuple):
    wants_metrics: bool  # behind the step that runs


class TellCached(NamedTuple):
    """Tell all that is cached: some news of it were lost."""


class Forget(NamedTuple):
    """Forget all that is cached."""


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
    """A replica could not start."""

    error: Exception


class Finish(NamedTuple):
    """How a completion ended."""

    reason: FinishReason
    stop_reason: str | int | None
    error: Exception | None
    embedding: Any
    metrics: Any  # of the request, when its last completion has ended


class Delta(NamedTuple):
    """What is new of one completion."""

    key: int
    completion: int  # its index
    first_token: int  # how many tokens of the completion come before these
    token_ids: list[int]
    text: str
    logprobs: list[Any] | None
    num_cached_tokens: int
    finish: Finish | None


@dataclass(slots=True)
class News:
    """What a step has brought.

    Attributes:
        first_change: number of the first of `changes` in the life of the replica.
        is_all: the changes begin with nothing cached.
        prompt_logprobs: by key, once all are known.
        metrics: what the engine counts, if that was asked for.
    """

    deltas: list[Delta] = field(default_factory=list)
    changes: list[KVChange] = field(default_factory=list)
    first_change: int = 0
    is_all: bool = False
    prompt_logprobs: dict[int, list[Any]] = field(default_factory=dict)
    metrics: Any = None


class Pong(NamedTuple):
    """A sign of life."""

    seconds_in_step: float  # that the step that runs has taken
