"""What the policy orders the runner's part to do, plan by plan, and what it hears of files. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

NAME = "kv_offload"
"""The key in `StepPlan.extras` (an Orders) and in `StepResult.extras` (a list of FileAnswer)."""


class Tier(IntEnum):
    POOL = 0
    HOST = 1
    FILE = 2
    STATES = 3


class Place(NamedTuple):
    """Where the K/V of one block can be, or a piece of states."""

    tier: Tier
    where: int | str  # a block of the pool, a slot of host memory, the name of a file, or a piece of the state pool


class Copy(NamedTuple):
    """Copy the K/V of one block. A file is written later, with the K/V that the source has now. A file is a source only after
    it was read.
    """

    source: Place
    target: Place
    header: bytes = b""  # of a file that is written: what it says of itself


class FileRead(NamedTuple):
    """Read a file into memory that is kept under its name."""

    name: str
    header: bytes  # what the file must say of itself


@dataclass(slots=True)
class Orders:
    """What one plan orders. Deletions come first, then copies in this order, all before the step computes."""

    copies: list[Copy] = field(default_factory=list)
    reads: list[FileRead] = field(default_factory=list)
    deletes: list[str] = field(default_factory=list)  # names of files
    clears: bool = False  # delete all files first
    kept: list[str] | None = None  # files that stay in memory behind these copies, or are being read; None: as before
    is_last: bool = False  # the engine ends: no file is left out because many are waiting to be written
    waits: bool = False  # nothing is computed: the step ends when a file was read, or a short time later

    def __bool__(self) -> bool:
        return bool(self.copies or self.reads or self.deletes or self.clears or self.kept is not None)


class FileAnswer(NamedTuple):
    """The end of a read or a write; or a file that was deleted to make room."""

    kind: str  # "read", "written", "gone"
    name: str
    problem: str | None = None  # None: it is done
