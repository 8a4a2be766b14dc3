"""Member: rank of a process in its group, and the memory of the group."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.errors import NanoEngineError

ALIVE = "alive"
"""The message of a rank while it starts."""


class RankLost(NanoEngineError, RuntimeError):
    """Another process of the group did not arrive within the time limit of a step."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the group, as in `EngineConfig.options` of every rank."""

    rank: int
    size: int
    memory: int
    """Descriptor of an empty file without a name: the shared memory of the group."""
    step_seconds: float
