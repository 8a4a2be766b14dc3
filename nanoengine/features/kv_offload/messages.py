"""Messages of offloading: the orders of a plan to the runner's part, and the outcomes of reads and writes. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

KV_OFFLOAD = "kv_offload"
"""The key in `StepPlan.extras` (an OffloadOrders) and in `StepResult.extras` (a list of FileOutcome)."""


class Tier(IntEnum):
    POOL = 0
    HOST = 1
    FILE = 2
    STATES = 3


class Location(NamedTuple):
    """The location of the K/V of one block, or of a piece of states."""

    tier: Tier
    key: int | str  # a block of the pool, a slot of host memory, the name of a file, or a piece of the state pool


class Copy(NamedTuple):
    """A copy of the K/V of one block. A file is written later, with the K/V that the source has now. A file is a source only
    after it was read.
    """

    source: Location
    target: Location
    header: bytes = b""  # of a file that is written


class FileRead(NamedTuple):
    """A read of a file into memory; the content is cached under the name of the file."""

    name: str
    header: bytes  # that the file must have


@dataclass(slots=True)
class OffloadOrders:
    """The orders of one plan. Deletions come first, then copies in this order, all before the step computes."""

    copies: list[Copy] = field(default_factory=list)
    reads: list[FileRead] = field(default_factory=list)
    deletes: list[str] = field(default_factory=list)  # names of files
    clears: bool = False  # delete all files first
    wanted: list[str] | None = None  # files whose contents stay in memory behind these copies; None: as before
    is_last: bool = False  # the engine ends: no write is refused because many are pending
    waits: bool = False  # the step computes nothing: it ends when a file was read, or a short time later

    def __bool__(self) -> bool:
        return bool(self.copies or self.reads or self.deletes or self.clears or self.wanted is not None)


class FileOutcome(NamedTuple):
    """The end of a read or a write; or a file that was deleted to free space."""

    kind: str  # "read", "written", "gone"
    name: str
    problem: str | None = None  # None: it was successful
