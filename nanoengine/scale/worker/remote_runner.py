"""RemoteRunner: an executor in front of a group of ranks, the processes that compute its plans."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import EngineClosed, shown
from nanoengine.core.messages import Launched, StepPlan
from nanoengine.errors import EngineDead
from nanoengine.scale.worker.child import START_SILENCE_SECONDS, end_children, ending_of, start_child
from nanoengine.scale.worker.link import Link, Unreadable, framed
from nanoengine.scale.worker.member import ALIVE, Member, RankLost

CLOSE_SECONDS = 5.0
"""Time limit for ranks to end by themselves."""

MORE_SECONDS = 0.5
"""Time beyond the limit of a rank that the group has for an answer: a rank that waits for another one can then name it."""


class RemoteRunner:
    """Starts the ranks of a group; `launch` sends the same plan to each. Rank 0 answers with the result, the other ranks only
    with success or an error.

    If a rank dies, hangs or sends a message that is not due, the group is ended, and `EngineDead` is raised here and for every
    later plan. Plans are numbered: an answer counts for the plan with its number alone.

    Args:
        config: of the ranks' engines.
        size: processes of the group.
        step_seconds: limit of a step.
        use_tqdm: show the progress of the start-up of rank 0.

    Raises:
        NanoEngineError: an error of a rank's start-up.
        EngineDead: a rank died while it started, or gave no sign of life.
    """

    recorder = None  # the ranks have one

    def __init__(self, config: EngineConfig, size: int, step_seconds: float, *, use_tqdm: bool = False):
        self.config, self.size, self.step_seconds = config, size, step_seconds
        self.processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Link] = []
        self._selector = selectors.DefaultSelector()
        self._num_sent, self._num_answered = 0, [0] * size
        self._answers: list[deque[tuple[int, bool, Any]]] = [deque() for _ in range(size)]  # by rank, not read yet
        self._is_closed = False
        self._start(use_tqdm)

    def _start(self, use_tqdm: bool) -> None:
        """Start all ranks, and wait until they are ready."""
        memory = os.memfd_create("nanoengine")
        try:
            for rank in range(self.size):
                process, connected = start_child("nanoengine.scale.worker.process", memory)
                self.processes.append(process)
                self._links.append(Link(connected, self._selector, rank))
                member = Member(rank, self.size, memory, self.step_seconds)
                self._links[rank].send((self.config, member, use_tqdm and rank == 0))
            self._wait_for_all()
        except BaseException:
            self._end()
            raise
        finally:
            os.close(memory)

    def _wait_for_all(self) -> None:
        last_signs = dict.fromkeys(
            range(self.size), time.monotonic()
        )  # rank that is not ready -> time of its last message
        while last_signs:
            most_silent = min(last_signs, key=last_signs.__getitem__)
            end = last_signs[most_silent] + START_SILENCE_SECONDS
            if time.monotonic() >= end:
                raise EngineDead(
                    f"{_name(most_silent)} has given no sign of life for {START_SILENCE_SECONDS:g} seconds"
                )
            for rank, message in self._receive(end):
                match message:
                    case (0, False, Exception() as error):
                        raise error
                    case (0, True, None) if rank in last_signs:
                        del last_signs[rank]
                    case _ if message == ALIVE and rank in last_signs:
                        last_signs[rank] = time.monotonic()
                    case _:
                        raise EngineDead(f"{_name(rank)} has said {shown(message)} while it started")

    def launch(self, plan: StepPlan) -> Launched:
        """Send a plan. Bytes for which a socket has no room now are sent during the wait for answers."""
        if self._is_closed:
            raise EngineClosed("the worker processes are closed")
        self._num_sent += 1
        message = framed((self._num_sent, plan))  # once for all
        for link in self._links:
            link.send_framed(message)
        return partial(self._answer, self._num_sent)

    def _answer(self, number: int) -> Any:
        """The answer of rank 0 to a plan. Unread answers to earlier plans are dropped."""
        if not self._links:
            raise EngineDead("the worker processes are gone: make a new engine")
        waiting = set(range(self.size))
        values: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        end = time.monotonic() + self.step_seconds + MORE_SECONDS
        while waiting:
            ready = [rank for rank in waiting if self._answers[rank]]
            if not ready and not self._read_answers(end):
                self._hang(sorted(waiting), errors)
            for rank in ready:
                answered, is_success, value = self._answers[rank].popleft()
                if isinstance(value, RankLost):
                    self._lose(str(value))
                if answered == number:
                    waiting.remove(rank)
                    (values if is_success else errors)[rank] = value
                    if not is_success:  # the other ranks fail as well, or wait for this rank in vain
                        end = min(end, time.monotonic() + MORE_SECONDS)
        if errors:
            raise errors[min(errors)]
        return values[0]

    def close(self) -> None:
        """End the ranks."""
        if not self._is_closed:
            self._is_closed = True
            for link in self._links:
                link.send(None)
            end = time.monotonic() + CLOSE_SECONDS
            with suppress(subprocess.TimeoutExpired):  # they are killed
                for process in self.processes:
                    process.wait(max(0.0, end - time.monotonic()))
            self._end()

    def _receive(self, until: float) -> list[tuple[int, Any]]:
        """Send the rest of the plans, and return the arrived messages as (rank, message); none if the time is over.

        Args:
            until: a time of `time.monotonic`.

        Raises:
            EngineDead: a rank is gone, or has sent bytes that are no message.
        """
        messages: list[tuple[int, Any]] = []
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            rank, link = key.data, self._links[key.data]
            link.flush()
            try:
                messages += [(rank, message) for message in link.receive()]
            except EOFError:
                self._lose(f"{_name(rank)} {ending_of(self.processes[rank])}")
            except Unreadable as error:
                self._lose(f"{_name(rank)} {error}")
        return messages

    def _read_answers(self, until: float) -> bool:
        """Queue the arrived answers; each rank must answer one plan after the other. False: the time is over."""
        messages = self._receive(until)
        for rank, message in messages:
            due = self._num_answered[rank] = self._num_answered[rank] + 1
            if not isinstance(message, tuple) or len(message) != 3 or message[0] != due or due > self._num_sent:
                self._lose(f"{_name(rank)} has said {shown(message)} where an answer to plan {due} was due")
            self._answers[rank].append(message)
        return bool(messages) or time.monotonic() < until

    def _hang(self, ranks: list[int], errors: dict[int, Exception]) -> NoReturn:
        if errors:
            rank, error = min(errors.items())
            self._lose(f"the worker process failed in rank {rank} alone ({type(error).__name__}: {error})")
        limit = f"worker_step_seconds={self.step_seconds}"
        self._lose(f"{_name(*ranks)} took more than {limit} for a step")

    def _lose(self, reason: str) -> NoReturn:
        self._end()
        raise EngineDead(reason)

    def _end(self) -> None:
        for link in self._links:
            link.close()
        self._links = []
        self._selector.close()
        end_children(*self.processes)


def _name(*ranks: int) -> str:
    return f"the worker process of rank {', '.join(map(str, ranks))}"
