"""RemoteRunner: an executor whose plans are carried out by a worker process, or by a group of them that share the model."""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
import tempfile
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import EngineClosed, shown
from nanoengine.core.messages import Launched, StepPlan
from nanoengine.errors import EngineDead
from nanoengine.scale.worker.child import RETRY_SECONDS, end_children, ending_of, start_child
from nanoengine.scale.worker.link import Link, Unreadable, framed
from nanoengine.scale.worker.member import ALIVE, Member, RankLost
from nanoengine.scale.worker.options import WorkerOptions

logger = logging.getLogger("nanoengine")

CLOSE_SECONDS = 5.0
"""How long workers may take to end by themselves."""

MORE_SECONDS = 0.5
"""How much longer than the limit of a rank the group is waited for: a rank that waits for another one can then name it."""

MOST_LOSSES = 3
"""When so many groups were lost at the same step, the requests of this step are ended."""


class WorkerLost(BaseException):
    """A worker process died or hung, and not yet `MOST_LOSSES` times at this step: the engine starts another one, and computes
    all requests again from their tokens. Not an Exception, so that the requests of the step are not ended.
    """


class RemoteRunner:
    """Starts the worker processes of a group; `launch` sends the same plan to each. Rank 0 answers with the result, the other
    ranks only with success or an error.

    If a process of a group is lost, or sends a message that is not due, the group is ended and `WorkerLost` is raised. If
    `MOST_LOSSES` groups are lost without an answer in between, `EngineDead` is raised, which ends the sequences of that step.
    After both, `restart` must be called. Plans are numbered, over all groups: an answer counts for its own plan alone.

    Args:
        config: of the workers' engines.
        size: processes of the group.
        limits: time limits of starts and steps.
        use_tqdm: show the progress of the start-up of rank 0.

    Raises:
        NanoEngineError: an error of a worker's start-up.
        EngineDead: a worker died while it started, or took too long.
    """

    recorder = None  # the workers have it

    def __init__(self, config: EngineConfig, size: int, limits: WorkerOptions, *, use_tqdm: bool = False):
        self.config, self.size, self.limits, self.use_tqdm = config, size, limits, use_tqdm
        self.num_starts = 0
        self._num_sent = 0
        self._num_losses = 0  # without an answer in between
        self._is_closed = False
        self.start()

    def start(self) -> None:
        """Start all workers, and wait until they are ready."""
        self._links: list[Link] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()
        self._first = self._num_sent + 1
        self._num_answered = [self._num_sent] * self.size
        self._answers: list[deque[tuple[int, bool, Any]]] = [deque() for _ in range(self.size)]  # by rank, not taken
        self.num_starts += 1
        memory = _nameless_file()
        try:
            for rank in range(self.size):
                process, own = start_child("nanoengine.scale.worker.process", memory)
                self.processes.append(process)
                self._links.append(Link(own, self._selector))
                self._links[rank].register(rank)
                member = Member(rank, self.size, memory, self.limits.worker_step_seconds)
                show = self.use_tqdm and self.num_starts == 1 and rank == 0
                self._links[rank].send((self.config, member, show))
            self._wait_for_all()
        except BaseException:
            self._end()
            raise
        finally:
            os.close(memory)

    def restart(self) -> None:
        """Start workers in place of lost ones, and again where these are lost while they start.

        Raises:
            EngineDead: `worker_start_attempts` starts have failed.
        """
        most = self.limits.worker_start_attempts
        failure: Exception | None = None
        for number in range(most):
            time.sleep(RETRY_SECONDS[min(number, len(RETRY_SECONDS) - 1)])
            try:
                self.start()
            except Exception as error:  # also of its start-up: memory of the lost worker may not be free yet
                failure = error
                logger.warning("start %d of at most %d (worker_start_attempts): %s", number + 1, most, error)
            else:
                return
        raise EngineDead(
            f"no worker process could be started anew, worker_start_attempts={most} times; the last error was: {failure}"
        ) from failure

    def _wait_for_all(self) -> None:
        """Wait until all workers are ready."""
        limits, now = self.limits, time.monotonic()
        end = now + limits.worker_start_seconds
        heard = dict.fromkeys(range(self.size), now)  # rank that is not ready -> time of its last message
        while heard:
            until = min(end, min(heard.values()) + limits.worker_silence_seconds)
            for rank, message in self._hear(until, " while it started"):
                match message:
                    case (0, False, Exception() as error):
                        raise error
                    case (0, True, None) if rank in heard:
                        del heard[rank]
                    case _ if message == ALIVE and rank in heard:
                        heard[rank] = time.monotonic()
                    case _:
                        raise EngineDead(f"{self._name(rank)} has said {shown(message)} while it started")
            now = time.monotonic()
            for rank, at in heard.items():
                if now >= end:
                    limit = f"worker_start_seconds={limits.worker_start_seconds:g}"
                    raise EngineDead(f"{self._name(rank)} was not ready within {limit}")
                if now >= at + limits.worker_silence_seconds:
                    limit = f"worker_silence_seconds={limits.worker_silence_seconds:g}"
                    raise EngineDead(f"{self._name(rank)} has given no sign of life for {limit} while it started")

    @property
    def is_alive(self) -> bool:
        return bool(self._links)

    def launch(self, plan: StepPlan) -> Launched:
        """Send a plan. What the sockets do not take now is sent while answers are waited for."""
        if self._is_closed:
            raise EngineClosed("the worker process is closed")
        self._num_sent += 1
        message = framed((self._num_sent, plan))  # once for all
        for link in self._links:
            link.send_framed(message)
        return partial(self.answer, self._num_sent)

    def answer(self, number: int) -> Any:
        """The answer of rank 0 to a plan. Answers to earlier plans, which nobody waited for, are dropped."""
        if number < self._first:
            raise EngineDead("the worker process that had this plan is gone")
        if not self._links:
            raise WorkerLost("the worker process is gone")
        waiting = set(range(self.size))
        values: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        end = time.monotonic() + self.limits.worker_step_seconds + MORE_SECONDS * (self.size > 1)
        while waiting:
            ready = [rank for rank in waiting if self._answers[rank]]
            if not ready and not self._take_answers(end):
                self._hang(sorted(waiting), errors)
            for rank in ready:
                found, is_well, value = self._answers[rank].popleft()
                if isinstance(value, RankLost):
                    self._lose(str(value))
                if found == number:
                    waiting.remove(rank)
                    (values if is_well else errors)[rank] = value
                    if not is_well:  # the other ranks fail as well, or wait for this rank in vain
                        end = min(end, time.monotonic() + MORE_SECONDS)
        self._num_losses = 0
        if errors:
            raise errors[min(errors)]
        return values[0]

    def close(self) -> None:
        """End the workers."""
        if not self._is_closed:
            self._is_closed = True
            for link in self._links:
                link.send(None)
            end = time.monotonic() + CLOSE_SECONDS
            with suppress(subprocess.TimeoutExpired):  # they are killed
                for process in self.processes:
                    process.wait(max(0.0, end - time.monotonic()))
            self._end()

    def _hear(self, until: float, when: str = "") -> list[tuple[int, Any]]:
        """Send the rest of the plans, and return the messages that have come as (rank, message); none if the time is over.

        Args:
            until: a time of `time.monotonic`.
            when: end of the error message.

        Raises:
            EngineDead: a rank is gone, or has sent bytes that are no message.
        """
        messages: list[tuple[int, Any]] = []
        for key, events in self._selector.select(max(0.0, until - time.monotonic())):
            rank, link = key.data, self._links[key.data]
            if events & selectors.EVENT_WRITE:
                link.flush()
            if events & selectors.EVENT_READ:
                try:
                    messages += [(rank, message) for message in link.receive()]
                except EOFError:
                    raise EngineDead(f"{self._name(rank)} {ending_of(self.processes[rank])}{when}") from None
                except Unreadable as error:
                    raise EngineDead(f"{self._name(rank)} {error}{when}") from error
        return messages

    def _take_answers(self, until: float) -> bool:
        """Take the answers that have come; each rank must answer one plan after the other. False: the time is over."""
        try:
            messages = self._hear(until)
        except EngineDead as error:
            self._lose(str(error))
        for rank, message in messages:
            due = self._num_answered[rank] = self._num_answered[rank] + 1
            if not isinstance(message, tuple) or len(message) != 3 or message[0] != due or due > self._num_sent:
                self._lose(f"{self._name(rank)} has said {shown(message)} where an answer to plan {due} was due")
            self._answers[rank].append(message)
        return bool(messages) or time.monotonic() < until

    def _hang(self, ranks: list[int], errors: dict[int, Exception]) -> NoReturn:
        if errors:
            rank, error = min(errors.items())
            self._lose(f"the worker process failed in rank {rank} alone ({type(error).__name__}: {error})")
        who = "" if self.size == 1 else f"of rank {', '.join(map(str, ranks))} "
        limit = f"worker_step_seconds={self.limits.worker_step_seconds}"
        self._lose(f"the worker process {who}took more than {limit} for a step")

    def _name(self, rank: int) -> str:
        return "the worker process" if self.size == 1 else f"the worker process of rank {rank}"

    def _lose(self, reason: str) -> NoReturn:
        self._end()
        self._num_losses += 1
        if self._num_losses < MOST_LOSSES:
            raise WorkerLost(reason)
        self._num_losses = 0
        raise EngineDead(f"{reason}; {MOST_LOSSES} were lost at the same step: its requests are ended")

    def _end(self) -> None:
        for link in self._links:
            link.close()
        self._links = []
        self._selector.close()
        end_children(*self.processes)


def _nameless_file() -> int:
    """Memory that processes share, as a file that cannot be left behind."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nanoengine")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
