"""Member: which process of a group this one is."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.errors import NanoEngineError


class RankLost(NanoEngineError, RuntimeError):
    """Another process of the group did not come within the time that a step may take."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the group; it stands in `EngineConfig.options` of every worker."""

    rank: int
    size: int
    memory: int
    """A descriptor of an empty file without a name: what the group's processes share. It is gone with the last of them."""
    step_seconds: float
