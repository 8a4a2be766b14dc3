"""Supervisor: starts replicas, receives their messages, and replaces a replica that dies, hangs or is old.

One thread calls it: `watch` waits for an event and handles it. Carriers start replicas in other threads.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from nanoengine.core.errors import shown
from nanoengine.core.sequence import Request
from nanoengine.errors import EngineDead
from nanoengine.scale.replicas.carrier import Carrier, StartedReplica
from nanoengine.scale.replicas.counts import ReplicaCounters
from nanoengine.scale.replicas.fleet import Fleet
from nanoengine.scale.replicas.messages import End, Failed, Ping, Pong, Ready, StepUpdate
from nanoengine.scale.replicas.options import ReplicaOptions
from nanoengine.scale.replicas.slots import ReplicaProcess, Slot, unavailable
from nanoengine.scale.worker.child import START_SILENCE_SECONDS
from nanoengine.scale.worker.link import Link, Unreadable

logger = logging.getLogger("nanoengine")

PING_SECONDS = 1.0
"""Interval of the pings, which a replica answers with a sign of life and its counters."""

END_SECONDS = 60.0
"""Limit of the end of a replica behind `End`: it may have files to write."""


class Supervisor:
    """Starts the replicas of a fleet, and watches them.

    Args:
        fleet: the requests, which go to the replicas.
        carrier: starts replicas.
        options: the number of replicas, and the limits after which one counts as lost.
    """

    def __init__(self, fleet: Fleet, carrier: Carrier, options: ReplicaOptions):
        self.fleet, self.carrier, self.options = fleet, carrier, options
        self.slots = [Slot(number) for number in range(options.replicas or 0)]
        self.facts: Ready | None = None  # of the first replica that was ready
        self.failure: Exception | None = None  # of the last replica that was lost, or could not be started
        self.unavailable: str | None = None  # reason to refuse requests, until a replica is ready
        self.advanced: dict[Request, None] = {}  # requests with new tokens or an end, until the engine clears it
        self.num_lost = 0  # replicas
        self.counts = ReplicaCounters()
        self._leaving: dict[ReplicaProcess, float] = {}  # processes behind `End` -> time at which they are killed
        self._to_restart: list[Slot] = []
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()  # results of the threads that start replicas
        self._num_processes = 0
        self._next_ping = 0.0
        self._last_alive = time.monotonic()  # time at which a replica last ran, or was starting
        self._is_closed = False
        self.selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self.selector.register(self._woken, selectors.EVENT_READ)

    @property
    def current(self) -> list[ReplicaProcess]:
        """Processes that accept requests."""
        return [slot.current for slot in self.slots if slot.current is not None]

    @property
    def num_ready(self) -> int:
        return len(self.current)

    def wake(self) -> None:
        """End the wait of `watch`, now or at its next call; from any thread."""
        with suppress(OSError):  # the socket is full, or closed
            self._wake.send(b"w")

    def wait(self) -> None:
        """Wait for an event: a message of a replica, a start or ping that is due, or `wake`."""
        self.selector.select(self._seconds_to_wait())

    def _seconds_to_wait(self) -> float:
        times = [self._next_ping, *(slot.start_at for slot in self.slots if slot.start_at is not None)]
        return max(0.0, min(times) - time.monotonic())

    def watch(self) -> None:
        """Wait for an event as `wait` does, and handle it."""
        for key, _ in self.selector.select(self._seconds_to_wait()):
            if key.data is None:
                with suppress(BlockingIOError):
                    while self._woken.recv(4096):
                        pass
            elif not key.data.link.is_closed:
                self._serve(key.data)
        while not self._calls.empty():
            self._calls.get()()
        self._check_times(time.monotonic())

    def restart(self) -> int:
        """Begin to replace every replica, one after the other; returns their number. A new replica is ready before requests move
        there from the old one.
        """
        self._to_restart = self.slots.copy()
        for slot in self.slots:
            slot.num_failed = 0
        self._restart_next()
        return len(self.slots)

    def send_all(self, message: Any) -> None:
        for process in self.current:
            process.link.send(message)

    def refresh_metrics(self, seconds: float = 5.0) -> None:
        """Ping all replicas, and wait for their counters, at most `seconds`."""
        pinged = [(process, process.num_counts) for process in self.current]
        self._next_ping, end = 0.0, time.monotonic() + seconds
        while time.monotonic() < end:
            self.watch()
            if all(each.num_counts > count or each is not each.slot.current for each, count in pinged):
                return

    def close(self, seconds: float = END_SECONDS) -> None:
        """End all replicas, and wait for it; after `seconds` they are killed."""
        self._is_closed, self._to_restart = True, []
        self.carrier.close()
        for slot in self.slots:
            slot.start_at = None
            for process in filter(None, (slot.current, slot.next)):
                self._dismiss(process, seconds if process.ready else 0.0)
            slot.current = slot.next = None
        while self._leaving or any(slot.is_starting for slot in self.slots):
            self.watch()
        self.selector.close()
        self._wake.close()
        self._woken.close()

    # ---- events

    def _serve(self, process: ReplicaProcess) -> None:
        process.link.flush()
        try:
            for message in process.link.receive():
                self._receive(process, message)
        except EOFError:
            reason = "" if process in self._leaving else process.started.ending()
        except Unreadable as error:
            reason = str(error)
        except Exception as error:  # the message has no meaning here: the replica may be of another version
            logger.exception("what replica %d has said cannot be used", process.slot.number)
            reason = f"has said what cannot be used ({type(error).__name__}: {str(error)[:80]})"
        else:
            return
        if process in self._leaving:
            self._reap(process)
        else:
            self._lose(process, reason)

    def _receive(self, process: ReplicaProcess, message: Any) -> None:
        slot, process.first_ping, process.last_message = process.slot, None, time.monotonic()
        if process not in (slot.current, slot.next):
            return  # it ends, and its requests have moved
        if isinstance(message, Pong):
            if message.seconds_in_step > (limit := self.options.replica_step_seconds):
                self._lose(process, f"has taken more than replica_step_seconds={limit:g} for a step")
        elif isinstance(message, StepUpdate) and process.ready:
            if message.metrics is not None:
                process.num_counts += 1
                self.counts.update(slot.number, message.metrics)
            if message.deltas:
                slot.num_useless = 0
            self.advanced.update(dict.fromkeys(self.fleet.receive(process.key, message)))
        elif isinstance(message, Ready) and not process.ready:
            self._handle_ready(process, message)
        elif isinstance(message, Failed):
            self._lose(process, f"could not {'go on' if process.ready else 'start'}: {message.error}", message.error)
        else:
            raise Unreadable(f"has said {shown(message)} out of turn")

    def _check_times(self, now: float) -> None:
        self._restart_next()
        for slot in self.slots:
            if slot.start_at is not None and slot.start_at <= now:
                slot.start_at, slot.is_starting = None, True
                threading.Thread(target=self._start, args=(slot,), daemon=True).start()
        if now < self._next_ping:
            return
        self.fleet.set_adapters()
        limit = self.options.replica_silence_seconds
        self._next_ping = now + min(PING_SECONDS, limit / 4)
        for process in self.current:
            if process.first_ping is not None and now - process.first_ping > limit:
                self._lose(process, f"has said nothing for replica_silence_seconds={limit:g}")
                continue
            process.first_ping = now if process.first_ping is None else process.first_ping
            process.link.send(Ping())
        for process in filter(None, [slot.next for slot in self.slots]):
            if now - process.began > (most := self.options.replica_start_seconds):
                self._lose(process, f"was not ready within replica_start_seconds={most:g}")
            elif now - process.last_message > (most := max(START_SILENCE_SECONDS, limit)):
                self._lose(process, f"has given no sign of life for {most:g} seconds (replica_silence_seconds)")
        for process in [process for process, end in self._leaving.items() if end < now]:
            self._reap(process)
        self._end_if_hopeless(now)

    def _end_if_hopeless(self, now: float) -> None:
        """End the requests that wait for a replica if none will be ready soon."""
        if any(slot.current or slot.next for slot in self.slots):
            self._last_alive = now
        reason = unavailable(self.slots, self.options, now - self._last_alive, self.carrier.waits)
        if reason is None or self._is_closed:
            return
        if self.unavailable is None:
            logger.error("requests are refused until a replica is ready: %s", reason)
        self.unavailable = f"{reason}; the last error was: {self.failure}"
        self.advanced.update(dict.fromkeys(self.fleet.fail(EngineDead(self.unavailable))))

    # ---- starts

    def _start(self, slot: Slot) -> None:
        """Start a process for a slot; runs in a separate thread."""
        try:
            self._calls.put(partial(self._handle_started, slot, self.carrier.start(slot.number)))
        except Exception as error:  # of any carrier
            self._calls.put(partial(self._handle_failure, slot, error))
        self.wake()

    def _handle_started(self, slot: Slot, started: StartedReplica) -> None:
        slot.is_starting = False
        self._num_processes += 1
        now = time.monotonic()
        process = slot.next = ReplicaProcess(self._num_processes, slot, started, now, now)
        process.link = Link(started.socket, self.selector, process)
        if started.first_message is not None:
            process.link.send(started.first_message)
        if self._is_closed:
            slot.next = None
            self._reap(process)

    def _handle_failure(self, slot: Slot, error: Exception) -> None:
        logger.error("replica %d could not be started: %s", slot.number, error)
        slot.is_starting, self.failure = False, error
        slot.num_failed += 1
        self._retry(slot)

    def _handle_ready(self, process: ReplicaProcess, ready: Ready) -> None:
        slot, old, process.ready = process.slot, process.slot.current, ready
        slot.num_failed, self.unavailable = 0, None
        self.facts = facts = self.facts or ready
        if ready != facts:
            logger.warning("replica %d is %s, the first was %s: tokens may differ", slot.number, ready, facts)
        slot.current, slot.next = process, None
        self.fleet.join(process.key, process.link)
        process.link.send(Ping())
        if old is not None:
            self.counts.remove(slot.number)
            self.fleet.drain(old.key)
            self._dismiss(old, END_SECONDS)

    def _restart_next(self) -> None:
        """Replace the next replica of a restart, unless a process starts in some slot."""
        if self._to_restart and not any(slot.has_successor for slot in self.slots):
            self._to_restart.pop(0).start_at = 0.0

    # ---- ends

    def _dismiss(self, process: ReplicaProcess, seconds: float) -> None:
        """Send `End` to a replica; it is killed after `seconds`."""
        process.link.send(End())
        self._leaving[process] = time.monotonic() + seconds

    def _reap(self, process: ReplicaProcess) -> None:
        self._leaving.pop(process, None)
        process.link.close()
        process.started.kill()

    def _lose(self, process: ReplicaProcess, reason: str, error: Exception | None = None) -> None:
        """Kill a replica that is gone, or hangs; its requests move, and another replica is started."""
        slot = process.slot
        reason = reason if process.ready or error else f"{reason} while it started"
        if process not in (slot.current, slot.next):
            return
        num_running = self.fleet.num_running(process.key)
        logger.warning("replica %d %s: %d requests of it go on", slot.number, reason, num_running)
        self.num_lost += 1
        self.failure = error or EngineDead(f"replica {slot.number} {reason}")
        self._reap(process)
        if slot.current is process:
            slot.current, slot.num_failed = None, 0  # failed starts before it do not count: it has run since
            slot.num_useless += 1
            self.counts.remove(slot.number)
        else:
            slot.next = None
            slot.num_failed += 1
        self.advanced.update(dict.fromkeys(self.fleet.lose(process.key)))
        self._retry(slot)

    def _retry(self, slot: Slot) -> None:
        """Start another process in a slot without one, unless it starts already."""
        if not (slot.has_successor or self._is_closed):
            if slot.has_failed(self.options):
                self._give_up(slot)
            else:
                slot.retry()
        self._end_if_hopeless(time.monotonic())

    def _give_up(self, slot: Slot) -> None:
        logger.error(
            "replica %d is given up: it could not be started, replica_start_attempts=%d times; the last error was: %s",
            slot.number,
            slot.num_failed,
            self.failure,
        )
        if left := [slot.number for slot in self._to_restart]:
            logger.error("the restart of replicas ends here: %s were not started anew", left)
            self._to_restart = []
