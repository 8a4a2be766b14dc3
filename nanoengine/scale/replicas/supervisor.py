"""Supervisor: starts replicas, receives their messages, and starts another replica in place of one that dies, hangs or is old.

One thread calls it: `watch` waits for an event and handles it. Carriers start replicas in threads of their own.
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
from nanoengine.scale.replicas.carrier import Carrier, Started
from nanoengine.scale.replicas.counts import Counts
from nanoengine.scale.replicas.fleet import Fleet
from nanoengine.scale.replicas.messages import End, Failed, News, Ping, Pong, Ready
from nanoengine.scale.replicas.options import ReplicaOptions
from nanoengine.scale.replicas.slots import Process, Slot, unavailable
from nanoengine.scale.worker.child import START_SILENCE_SECONDS
from nanoengine.scale.worker.link import Link, Unreadable

logger = logging.getLogger("nanoengine")

PING_SECONDS = 1.0
"""How often a replica is asked for a sign of life, and for its counters."""

END_SECONDS = 60.0
"""How long a replica that was told to end may take: it may have files to write."""


class Supervisor:
    """Keeps the members of a fleet alive.

    Args:
        fleet: the requests, which it sends to the replicas.
        carrier: starts replicas.
        options: the number of replicas, and the limits after which one counts as lost.
    """

    def __init__(self, fleet: Fleet, carrier: Carrier, options: ReplicaOptions):
        self.fleet, self.carrier, self.options = fleet, carrier, options
        self.slots = [Slot(number) for number in range(options.replicas or 0)]
        self.facts: Ready | None = None  # of the first replica that was ready
        self.failure: Exception | None = None  # why the last replica was lost, or could not be started
        self.unavailable: str | None = None  # why requests are refused, until a replica is ready
        self.touched: dict[Request, None] = {}  # requests with new tokens or an end, until somebody takes them out
        self.num_lost = 0  # replicas
        self.counts = Counts()
        self._leaving: dict[Process, float] = {}  # processes that were told to end, and when they are killed
        self._to_restart: list[Slot] = []
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()  # results of the threads that start replicas
        self._num_processes = 0
        self._next_ping = 0.0
        self._last_there = time.monotonic()  # when a replica last ran, or was starting
        self._is_closed = False
        self.selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self.selector.register(self._woken, selectors.EVENT_READ)

    @property
    def current(self) -> list[Process]:
        """Replicas that take requests."""
        return [slot.current for slot in self.slots if slot.current is not None]

    @property
    def num_ready(self) -> int:
        return len(self.current)

    def wake(self) -> None:
        """End the wait of `watch`, or of the next one; from any thread."""
        with suppress(OSError):  # it was woken before, or is closed
            self._wake.send(b"w")

    def wait(self) -> None:
        """Wait for an event: a message of a replica, a time at which something is due, or `wake`."""
        self.selector.select(self._seconds_to_wait())

    def _seconds_to_wait(self) -> float:
        times = [self._next_ping, *(slot.start_at for slot in self.slots if slot.start_at is not None)]
        return max(0.0, min(times) - time.monotonic())

    def watch(self) -> None:
        """Wait for an event as `wait` does, and handle it."""
        for key, events in self.selector.select(self._seconds_to_wait()):
            if key.data is None:
                with suppress(BlockingIOError):
                    while self._woken.recv(4096):
                        pass
            elif not key.data.link.is_closed:
                self._serve(key.data, events)
        while not self._calls.empty():
            self._calls.get()()
        self._look_at_clock(time.monotonic())

    def restart(self) -> int:
        """Begin to replace every replica, one after the other, and return how many these are. The new replica is ready before
        requests move there from the old one.
        """
        self._to_restart = self.slots.copy()
        for slot in self.slots:
            slot.num_failed = 0
        self._restart_next()
        return len(self.slots)

    def tell_all(self, message: Any) -> None:
        for process in self.current:
            process.link.send(message)

    def ask_for_metrics(self, seconds: float = 5.0) -> None:
        """Ask all replicas for their counters, and wait for these, at most so long."""
        asked = [(process, process.num_counts) for process in self.current]
        self._next_ping, end = 0.0, time.monotonic() + seconds
        while time.monotonic() < end:
            self.watch()
            if all(own.num_counts > count or own is not own.slot.current for own, count in asked):
                return

    def close(self, seconds: float = END_SECONDS) -> None:
        """End all replicas, and wait until they have ended; replicas that take longer than that are killed."""
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

    def _serve(self, process: Process, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            process.link.flush()
        if not events & selectors.EVENT_READ:
            return
        try:
            for message in process.link.receive():
                self._receive(process, message)
        except EOFError:
            why = "" if process in self._leaving else process.started.ending()
        except Unreadable as error:
            why = str(error)
        except Exception as error:  # a message without a meaning here: perhaps the replica is of another version
            logger.exception("what replica %d has said cannot be used", process.slot.number)
            why = f"has said what cannot be used ({type(error).__name__}: {str(error)[:80]})"
        else:
            return
        if process in self._leaving:
            self._reap(process)
        else:
            self._lose(process, why)

    def _receive(self, process: Process, message: Any) -> None:
        slot, process.asked, process.heard = process.slot, None, time.monotonic()
        if process not in (slot.current, slot.next):
            return  # it ends, and its requests have moved
        if isinstance(message, Pong):
            if message.seconds_in_step > (limit := self.options.replica_step_seconds):
                self._lose(process, f"has taken more than replica_step_seconds={limit:g} for a step")
        elif isinstance(message, News) and process.ready:
            if message.metrics is not None:
                process.num_counts += 1
                self.counts.take(slot.number, message.metrics)
            if message.deltas:
                slot.num_useless = 0
            self.touched.update(dict.fromkeys(self.fleet.receive(process.key, message)))
        elif isinstance(message, Ready) and not process.ready:
            self._take_ready(process, message)
        elif isinstance(message, Failed):
            self._lose(process, f"could not {'go on' if process.ready else 'start'}: {message.error}", message.error)
        else:
            raise Unreadable(f"has said {shown(message)} out of turn")

    def _look_at_clock(self, now: float) -> None:
        self._restart_next()
        for slot in self.slots:
            if slot.start_at is not None and slot.start_at <= now:
                slot.start_at, slot.is_starting = None, True
                threading.Thread(target=self._start, args=(slot,), daemon=True).start()
        if now < self._next_ping:
            return
        self.fleet.equip()
        limit = self.options.replica_silence_seconds
        self._next_ping = now + min(PING_SECONDS, limit / 4)
        for process in self.current:
            if process.asked is not None and now - process.asked > limit:
                self._lose(process, f"has said nothing for replica_silence_seconds={limit:g}")
                continue
            process.asked = now if process.asked is None else process.asked
            process.link.send(Ping(wants_metrics=True))
        for process in filter(None, [slot.next for slot in self.slots]):
            if now - process.began > (most := self.options.replica_start_seconds):
                self._lose(process, f"was not ready within replica_start_seconds={most:g}")
            elif now - process.heard > (most := max(START_SILENCE_SECONDS, limit)):
                self._lose(process, f"has given no sign of life for {most:g} seconds (replica_silence_seconds)")
        for process in [process for process, end in self._leaving.items() if end < now]:
            self._reap(process)
        self._end_if_hopeless(now)

    def _end_if_hopeless(self, now: float) -> None:
        """If no replica is to come soon, end the requests that wait for one."""
        if any(slot.current or slot.next for slot in self.slots):
            self._last_there = now
        reason = unavailable(self.slots, self.options, now - self._last_there, self.carrier.waits)
        if reason is None or self._is_closed:
            return
        if self.unavailable is None:
            logger.error("requests are refused until a replica is ready: %s", reason)
        self.unavailable = f"{reason}; the last error was: {self.failure}"
        self.touched.update(dict.fromkeys(self.fleet.fail(EngineDead(self.unavailable))))

    # ---- starts

    def _start(self, slot: Slot) -> None:
        """In a thread of its own."""
        try:
            self._calls.put(partial(self._take_started, slot, self.carrier.start(slot.number)))
        except Exception as error:  # whatever the carrier raises
            self._calls.put(partial(self._take_failure, slot, error))
        self.wake()

    def _take_started(self, slot: Slot, started: Started) -> None:
        slot.is_starting = False
        self._num_processes += 1
        now = time.monotonic()
        process = slot.next = Process(self._num_processes, slot, started, now, now)
        process.link = Link(started.socket, self.selector, process)
        if self._is_closed:
            slot.next = None
            self._reap(process)

    def _take_failure(self, slot: Slot, error: Exception) -> None:
        logger.error("replica %d could not be started: %s", slot.number, error)
        slot.is_starting, self.failure = False, error
        slot.num_failed += 1
        self._retry(slot)

    def _take_ready(self, process: Process, ready: Ready) -> None:
        slot, old, process.ready = process.slot, process.slot.current, ready
        slot.num_failed, self.unavailable = 0, None
        self.facts = facts = self.facts or ready
        if ready != facts:
            logger.warning("replica %d is %s, the first was %s: tokens may differ", slot.number, ready, facts)
        slot.current, slot.next = process, None
        self.fleet.join(process.key, process.link)
        process.link.send(Ping(wants_metrics=True))
        if old is not None:
            self.counts.leave(slot.number)
            self.fleet.drain(old.key)
            self._dismiss(old, END_SECONDS)

    def _restart_next(self) -> None:
        """Replace the next replica of a restart, when no process is on its way in any slot."""
        if self._to_restart and not any(slot.has_successor for slot in self.slots):
            self._to_restart.pop(0).start_at = 0.0

    # ---- ends

    def _dismiss(self, process: Process, seconds: float) -> None:
        """Tell a replica to end; it is killed after so many seconds."""
        process.link.send(End())
        self._leaving[process] = time.monotonic() + seconds

    def _reap(self, process: Process) -> None:
        self._leaving.pop(process, None)
        process.link.close()
        process.started.kill()

    def _lose(self, process: Process, why: str, error: Exception | None = None) -> None:
        """A replica is gone, or hangs: its requests move, and another replica is started."""
        slot = process.slot
        why = why if process.ready or error else f"{why} while it started"
        if process not in (slot.current, slot.next):
            return
        num_running = self.fleet.num_running(process.key)
        logger.warning("replica %d %s: %d requests of it go on", slot.number, why, num_running)
        self.num_lost += 1
        self.failure = error or EngineDead(f"replica {slot.number} {why}")
        self._reap(process)
        if slot.current is process:
            slot.current, slot.num_failed = None, 0  # failed starts of a restart before: this replica has run since
            slot.num_useless += 1
            self.counts.leave(slot.number)
        else:
            slot.next = None
            slot.num_failed += 1
        self.touched.update(dict.fromkeys(self.fleet.lose(process.key)))
        self._retry(slot)

    def _retry(self, slot: Slot) -> None:
        """Start another process in a slot whose process was lost or could not be started, unless one is on its way."""
        if not (slot.has_successor or self._is_closed):
            if slot.is_given_up(self.options):
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
        if left := [own.number for own in self._to_restart]:
            logger.error("the restart of replicas ends here: %s were not started anew", left)
            self._to_restart = []
