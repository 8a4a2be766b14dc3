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
        replicas: engines, each in a process of its own, that share the requests. A request goes where most of its prompt is
            cached and least is to do; if its replica dies, it goes on in another, with the same tokens. 0: one engine, in this
            process.
        replica_silence_seconds: a replica that says nothing for so long hangs, and is killed; one that starts may say nothing for
            60 seconds at least. Above 0.
        replica_step_seconds: so does one whose step takes longer. Above 0.
        replica_start_seconds: so does one whose start takes longer, the loading of the model included. Above 0.
        replica_wait_seconds: when no replica has run or been starting for so long, requests end, and new ones are refused until
            one is ready. Above 0.
        replica_start_attempts: a replica that could not be started so often, one time after the other, is given up. 1 or more.

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
