"""Member: the place of a process in its group."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.errors import NanoEngineError

ALIVE = "alive"
"""The message of a rank while it starts."""


class RankLost(NanoEngineError, RuntimeError):
    """Another process of the group did not come within the time that a step may take."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the group; it stands in `EngineConfig.options` of every rank."""

    rank: int
    size: int
    memory: int
    """Descriptor of an empty file without a name, which the processes of the group share as memory."""
    step_seconds: float
