"""Slots: the place of each replica, the process that is in it, and how often the processes before it have failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from nanoengine.scale.replicas.carrier import Started
from nanoengine.scale.replicas.messages import Ready
from nanoengine.scale.replicas.options import ReplicaOptions
from nanoengine.scale.worker.link import Link

RETRY_SECONDS = (0.0, 1.0, 5.0, 15.0, 60.0)
"""Seconds to wait before a process is started again, by the number of failures in a row before."""

MOST_USELESS = 3
"""When more replicas than these were lost in every slot, one after the other, before they computed a token, requests end."""


@dataclass(eq=False)
class Process:
    """A replica that was started. Times in seconds of `time.monotonic`."""

    key: int  # unique: a process that is started in its place has another
    slot: Slot
    started: Started
    began: float  # when it was started
    heard: float  # when its last message came
    link: Link = field(init=False)
    asked: float | None = None  # when it was sent the first ping after that message
    ready: Ready | None = None
    num_counts: int = 0  # how many times it has sent its counters


@dataclass(eq=False)
class Slot:
    """The place of a replica."""

    number: int
    start_at: float | None = 0.0  # when the next process is to be started; None: not at all
    is_starting: bool = False  # the carrier is starting a process
    current: Process | None = None  # takes requests
    next: Process | None = None  # was started, and is not ready yet
    num_useless: int = 0  # processes in a row that were ready, and were lost before they computed a token
    num_failed: int = 0  # starts in a row that failed

    @property
    def has_successor(self) -> bool:
        """Whether a process is on its way, or is to be started."""
        return self.next is not None or self.is_starting or self.start_at is not None

    def retry(self) -> None:
        """Start another process: at once after the first failure, and later the more there were in a row."""
        num_failures = max(self.num_useless + self.num_failed, 1)
        self.start_at = time.monotonic() + RETRY_SECONDS[min(num_failures, len(RETRY_SECONDS)) - 1]

    def is_given_up(self, options: ReplicaOptions) -> bool:
        """Whether no process is started here any more, until a restart."""
        return self.num_failed >= options.replica_start_attempts


def unavailable(
    slots: Sequence[Slot], options: ReplicaOptions, seconds_without: float, waits: dict[int, str]
) -> str | None:
    """Why no replica will come soon; None: one is there, or may come.

    Args:
        seconds_without: time since some replica ran, or was starting.
        waits: see `Carrier.waits`.
    """
    if any(slot.current for slot in slots):
        return None
    if all(slot.is_given_up(options) for slot in slots):
        limit = f"replica_start_attempts={options.replica_start_attempts}"
        return f"all replicas are given up, which could not be started {limit} times"
    if all(slot.num_useless > MOST_USELESS for slot in slots):
        return "no replica lives long enough to compute anything"
    if seconds_without > options.replica_wait_seconds:
        waiting = "".join(f"; replica {number} waits for {what}" for number, what in sorted(waits.items()))
        return f"no replica has come within replica_wait_seconds={options.replica_wait_seconds:g}{waiting}"
    return None
