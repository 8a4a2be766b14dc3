"""Options of replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanoengine.core.config import EngineConfig
from nanoengine.core.options import option
from nanoengine.options import Options

MOST_REPLICAS = 256
"""Limit of replicas: the router scores all of them for each request."""

MOST_SECONDS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions(Options):
    """Options of replicas; all are keyword arguments of `LLM`.

    Args:
        replicas: engines, each in a separate process, among which requests are divided. A request goes to the replica with
            most of its prompt cached and least to do; if this replica dies, another one goes on with the same tokens.
            0: one engine, in this process. None: 1 where tensor_parallel_size is above 1, and otherwise 0.
        replica_silence_seconds: a replica that sends nothing for so long is killed; the limit is 60 seconds at least while a
            replica starts. Above 0.
        replica_step_seconds: a replica whose step takes longer is killed. Above 0.
        replica_start_seconds: a replica whose start takes longer, the loading of the model included, is killed. Above 0.
        replica_wait_seconds: when no replica has run or been starting for so long, requests end, and new requests are refused
            until a replica is ready. Above 0.
        replica_start_attempts: limit of the failed starts of a replica in a row; it stays lost then. 1 or more.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    replicas: int | None = option(None, 0, MOST_REPLICAS)
    replica_silence_seconds: float = option(20.0, 0, MOST_SECONDS, above=True)
    replica_step_seconds: float = option(300.0, 0, MOST_SECONDS, above=True)
    replica_start_seconds: float = option(1800.0, 0, MOST_SECONDS, above=True)
    replica_wait_seconds: float = option(120.0, 0, MOST_SECONDS, above=True)
    replica_start_attempts: int = option(10, high=2**20)


def option_of(config: EngineConfig, name: str) -> Any:
    """An option of any capability; None if no capability has it."""
    return next((getattr(options, name) for options in config.options.values() if hasattr(options, name)), None)


def num_ranks_of(config: EngineConfig) -> int:
    """Ranks of a replica."""
    return option_of(config, "tensor_parallel_size") or 1


def num_replicas_of(config: EngineConfig) -> int:
    """Number of replicas. A group of ranks is in one, so that its requests go on when it is lost."""
    replicas = config.of(ReplicaOptions).replicas
    return int(num_ranks_of(config) > 1) if replicas is None else replicas
