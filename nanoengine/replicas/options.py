"""Options of replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from nanoengine.core.config import EngineConfig, check_count
from nanoengine.core.errors import InvalidConfig, shown

MOST_REPLICAS = 256
"""The router looks at all of them for each request."""

LIMITS = ("replica_silence_seconds", "replica_step_seconds", "replica_start_seconds", "replica_wait_seconds")
"""Options that are times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Options of replicas; all are keyword arguments of `LLM`.

    Args:
        replicas: engines, each in a process of its own, that share the requests. A request goes to the replica that has most of
            its prompt cached and least to do; if this replica dies, another one goes on with the request, with the same tokens.
            0: one engine, in this process.
        replica_silence_seconds: a replica that sends nothing for so long is killed; the limit is 60 seconds at least while a
            replica starts. Above 0.
        replica_step_seconds: a replica whose step takes longer is killed. Above 0.
        replica_start_seconds: a replica whose start takes longer, the loading of the model included, is killed. Above 0.
        replica_wait_seconds: when no replica has run or been starting for so long, requests end, and new requests are refused
            until a replica is ready. Above 0.
        replica_start_attempts: a replica is given up after so many failed starts in a row. 1 or more.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    replicas: int = 0
    replica_silence_seconds: float = 20.0
    replica_step_seconds: float = 300.0
    replica_start_seconds: float = 1800.0
    replica_wait_seconds: float = 120.0
    replica_start_attempts: int = 10

    def __post_init__(self) -> None:
        if type(self.replicas) is not int or not 0 <= self.replicas <= MOST_REPLICAS:
            raise InvalidConfig(f"replicas is {shown(self.replicas)}: it must be an integer from 0 to {MOST_REPLICAS}")
        check_count("replica_start_attempts", self.replica_start_attempts, 2**20)
        for name in LIMITS:
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
                raise InvalidConfig(f"{name} is {shown(seconds)}: it must be above 0, in seconds")


def option(config: EngineConfig, name: str) -> Any:
    """An option of any capability; None if nobody has it."""
    return next((getattr(own, name) for own in config.options.values() if hasattr(own, name)), None)
