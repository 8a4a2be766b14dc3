"""RemoteRunner: an executor whose plans are carried out by a worker process, or by a group of them that share the model."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn, cast

from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import EngineClosed
from nanoengine.core.messages import StepPlan, StepResult
from nanoengine.errors import EngineDead
from nanoengine.worker.child import start_child
from nanoengine.worker.member import Member, RankLost

CLOSE_SECONDS = 5.0
"""How long a worker may take to end by itself."""

MORE_SECONDS = 0.5
"""How long others of a group may take longer than one of them: who waits for a rank that hangs can say which it is."""


class WorkerLost(BaseException):
    """A worker process died or hung, and nobody is to blame yet: all sequences resume, as after Ctrl-C."""


class RemoteStep:
    """A plan that was sent."""

    def __init__(self, runner: RemoteRunner, number: int):
        self.runner, self.number = runner, number

    def result(self) -> StepResult:
        """Wait for its end, and raise what went wrong in it."""
        return cast(StepResult, self.runner.answer(self.number))


class RemoteRunner:
    """Starts the worker processes of a group; `launch` sends each the same plan. Rank 0 answers; of the others it is known that
    all went well.

    A group of which a process is lost is ended and raises `WorkerLost`. If the next one is lost as well before it has answered
    anything, what is computed is to blame, and `EngineDead` is raised, which ends the sequences of that step. After both `start`
    must be called.

    Args:
        config: of the workers' engines.
        size: processes of the group.
        step_seconds: a step that takes longer hangs.
        start_seconds: so does a start.
        use_tqdm: show what the start-up of rank 0 is doing.

    Raises:
        NanoEngineError: what a worker's start-up raised.
        EngineDead: it died without a word, or took too long.
    """

    recorder = None  # the workers have it

    def __init__(
        self,
        config: EngineConfig,
        size: int = 1,
        *,
        step_seconds: float,
        start_seconds: float,
        use_tqdm: bool = False,
    ):
        self.config, self.size, self.use_tqdm = config, size, use_tqdm
        self.step_seconds, self.start_seconds = step_seconds, start_seconds
        self.num_starts = 0
        self._num_losses = 0  # without an answer in between
        self._is_closed = False
        self.start()

    def start(self) -> None:
        """Start all workers, and wait until they are ready."""
        self._connections: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._num_sent = 0
        self.num_starts += 1
        memory = _nameless_file()
        try:
            for rank in range(self.size):
                self._connections.append(self._new_worker(memory))
                member = Member(rank, self.size, memory, self.step_seconds)
                show = self.use_tqdm and self.num_starts == 1 and rank == 0
                self._connections[rank].send((self.config, member, show))
            answers = self._wait_for_all()
        except (EOFError, OSError) as error:
            self._end()
            raise EngineDead(f"{self._dead()} while it started") from error
        except BaseException:
            self._end()
            raise
        finally:
            os.close(memory)
        for _, is_well, value in answers:
            if not is_well:
                self._end()
                raise value

    def _wait_for_all(self) -> list[Any]:
        """The first message of each, which says how its start went."""
        end, answers = time.monotonic() + self.start_seconds, []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(max(0.0, end - time.monotonic())):
                who = "" if self.size == 1 else f" of rank {rank}"
                raise EngineDead(
                    f"the worker process{who} was not ready within worker_start_seconds={self.start_seconds:g}"
                )
            answers.append(connection.recv())
        return answers

    def _new_worker(self, memory: int) -> Connection:
        process, own = start_child("nanoengine.worker.process", memory)
        self.processes.append(process)
        return Connection(own.detach())

    @property
    def is_alive(self) -> bool:
        return all(process.returncode is None for process in self.processes)

    def launch(self, plan: StepPlan) -> RemoteStep:
        if self._is_closed:
            raise EngineClosed("the worker process is closed")
        self._num_sent += 1
        message = ForkingPickler.dumps((self._num_sent, plan))  # once for all
        try:
            for connection in self._connections:
                connection.send_bytes(message)
        except OSError:
            self._lose(self._dead())
        return RemoteStep(self, self._num_sent)

    def answer(self, number: int) -> Any:
        """What rank 0 says to a plan; what was said to plans before that, which nobody waited for, is dropped."""
        waiting = dict(zip(self._connections, range(self.size), strict=True))
        values: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        end = time.monotonic() + self.step_seconds + MORE_SECONDS * (self.size > 1)
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                self._hang(list(waiting.values()), errors)
            for connection in cast(list[Connection], ready):
                try:
                    found, is_well, value = connection.recv()
                except (EOFError, OSError):
                    self._lose(self._dead())
                if isinstance(value, RankLost):
                    self._lose(str(value))
                if found == number:
                    rank = waiting.pop(connection)
                    (values if is_well else errors)[rank] = value
                    if not is_well:  # what went wrong goes wrong everywhere, or the others wait for this one in vain
                        end = min(end, time.monotonic() + MORE_SECONDS)
        self._num_losses = 0
        if errors:
            raise errors[min(errors)]
        return values[0]

    def close(self) -> None:
        """End the workers."""
        if not self._is_closed:
            self._is_closed = True
            try:
                for connection in self._connections:
                    connection.send(None)
                for process in self.processes:
                    process.wait(CLOSE_SECONDS)
            except (OSError, subprocess.TimeoutExpired):
                pass  # they are killed
            self._end()

    def _hang(self, ranks: list[int], errors: dict[int, Exception]) -> NoReturn:
        if errors:
            rank, error = min(errors.items())
            self._lose(f"the worker process failed in rank {rank} alone ({type(error).__name__}: {error})")
        who = "" if self.size == 1 else f"of rank {', '.join(map(str, ranks))} "
        self._lose(f"the worker process {who}took more than worker_step_seconds={self.step_seconds} for a step")

    def _dead(self) -> str:
        """Who has ended, and how; called when one has."""
        for rank, process in enumerate(self.processes):
            try:
                status = process.wait(0.2 if self.size > 1 else 1.0)
            except subprocess.TimeoutExpired:
                continue
            who = "" if self.size == 1 else f"of rank {rank} "
            return f"the worker process {who}died (status {status})"
        return "a worker process closed its socket"

    def _lose(self, reason: str) -> NoReturn:
        self._end()
        self._num_losses += 1
        if self._num_losses == 1:
            raise WorkerLost(reason)
        self._num_losses = 0
        raise EngineDead(f"{reason}, twice at the same step: its requests are ended")

    def _end(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def _nameless_file() -> int:
    """Memory that processes share, as a file that cannot be left behind."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nanoengine")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
