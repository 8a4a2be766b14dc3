"""Slots: the current process of each replica, its successor, and the failures of the processes before."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from nanoengine.scale.replicas.carrier import StartedReplica
from nanoengine.scale.replicas.messages import Ready
from nanoengine.scale.replicas.options import ReplicaOptions
from nanoengine.scale.worker.link import Link

RETRY_SECONDS = (0.0, 1.0, 5.0, 15.0, 60.0)
"""Seconds to wait before a process is started again, by the number of failures in a row before."""

MOST_USELESS = 3
"""Limit of the processes in a row that are lost before they compute a token; above it in every slot, requests end."""


@dataclass(eq=False)
class ReplicaProcess:
    """A process of a replica. Times in seconds of `time.monotonic`."""

    key: int  # unique: its successor has another
    slot: Slot
    started: StartedReplica
    began: float  # time of its start
    last_message: float  # time of its last message
    link: Link = field(init=False)
    first_ping: float | None = None  # time of the first ping after that message
    ready: Ready | None = None
    num_counts: int = 0  # messages with counters


@dataclass(eq=False)
class Slot:
    """One of the replicas: its process now, and the next one."""

    number: int
    start_at: float | None = 0.0  # time of the next start; None: no start
    is_starting: bool = False  # the carrier is starting a process
    current: ReplicaProcess | None = None  # accepts requests
    next: ReplicaProcess | None = None  # was started, and is not ready yet
    num_useless: int = 0  # processes in a row that were ready, and lost before they computed a token
    num_failed: int = 0  # starts in a row that failed

    @property
    def has_successor(self) -> bool:
        """Whether a process starts, or is to be started."""
        return self.next is not None or self.is_starting or self.start_at is not None

    def retry(self) -> None:
        """Schedule the start of another process: at once after the first failure, and later after more in a row."""
        num_failures = max(self.num_useless + self.num_failed, 1)
        self.start_at = time.monotonic() + RETRY_SECONDS[min(num_failures, len(RETRY_SECONDS)) - 1]

    def has_failed(self, options: ReplicaOptions) -> bool:
        """Whether the slot stays empty until a restart."""
        return self.num_failed >= options.replica_start_attempts


def unavailable(
    slots: Sequence[Slot], options: ReplicaOptions, seconds_without: float, waits: dict[int, str]
) -> str | None:
    """Reason why no replica will be ready soon; None: a replica runs, or may be ready soon.

    Args:
        seconds_without: time since a replica last ran, or was starting.
        waits: see `Carrier.waits`.
    """
    if any(slot.current for slot in slots):
        return None
    if all(slot.has_failed(options) for slot in slots):
        limit = f"replica_start_attempts={options.replica_start_attempts}"
        return f"all replicas are given up, which could not be started {limit} times"
    if all(slot.num_useless > MOST_USELESS for slot in slots):
        return "no replica lives long enough to compute anything"
    if seconds_without > options.replica_wait_seconds:
        waiting = "".join(f"; replica {number} waits for {missing}" for number, missing in sorted(waits.items()))
        return f"no replica has come within replica_wait_seconds={options.replica_wait_seconds:g}{waiting}"
    return None
