"""RemoteRunner: an executor whose plans are carried out by a worker process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import EngineClosed
from nanoengine.core.messages import StepPlan, StepResult
from nanoengine.errors import EngineDead

CLOSE_SECONDS = 5.0
"""How long a worker may take to end by itself."""


class WorkerLost(BaseException):
    """The worker process died or hung, and nobody is to blame yet: all sequences resume, as after Ctrl-C."""


class RemoteStep:
    """A plan that was sent."""

    def __init__(self, runner: RemoteRunner, number: int):
        self.runner, self.number = runner, number

    def result(self) -> StepResult:
        """Wait for its end, and raise what went wrong in it."""
        return cast(StepResult, self.runner.answer(self.number))


class RemoteRunner:
    """Starts a worker process; `launch` sends it a plan.

    A worker that is lost raises `WorkerLost`. If the next one is lost as well before it has answered anything, what is computed
    is to blame, and `EngineDead` is raised, which ends the sequences of that step. After both `start` must be called.

    Args:
        config: of the worker's engine.
        step_seconds: a step that takes longer hangs.
        use_tqdm: show what the worker's start-up is doing.

    Raises:
        NanoEngineError: what the worker's start-up raised.
        EngineDead: it died without a word.
    """

    recorder = None  # the worker has it

    def __init__(self, config: EngineConfig, step_seconds: float, *, use_tqdm: bool = False):
        self.config, self.step_seconds, self.use_tqdm = config, step_seconds, use_tqdm
        self.num_starts = 0
        self._num_losses = 0  # without an answer in between
        self._is_closed = False
        self.start()

    def start(self) -> None:
        """Start a worker, and wait until it is ready."""
        own, other = socket.socketpair()
        root = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nanoengine.worker.process", str(other.fileno())],
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": paths},
        )
        other.close()
        self._connection = Connection(own.detach())
        self._num_sent = 0
        self.num_starts += 1
        try:
            self._connection.send((self.config, self.use_tqdm and self.num_starts == 1))
            _, is_well, value = self._connection.recv()
        except (EOFError, OSError) as error:
            self._end()
            raise EngineDead(
                f"the worker process ended with status {self.process.returncode} while it started"
            ) from error
        except BaseException:
            self._end()
            raise
        if not is_well:
            self._end()
            raise value

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None

    def launch(self, plan: StepPlan) -> RemoteStep:
        if self._is_closed:
            raise EngineClosed("the worker process is closed")
        self._num_sent += 1
        try:
            self._connection.send((self._num_sent, plan))
        except OSError:
            self._lose("is gone")
        return RemoteStep(self, self._num_sent)

    def answer(self, number: int) -> Any:
        """What the worker says to a plan; what it said to plans before that, which nobody waited for, is dropped."""
        found = -1
        while found < number:
            try:
                if not self._connection.poll(self.step_seconds):
                    self._lose(f"took more than worker_step_seconds={self.step_seconds} for a step")
                found, is_well, value = self._connection.recv()
            except (EOFError, OSError):
                self._lose("died")
        self._num_losses = 0
        if not is_well:
            raise value
        return value

    def close(self) -> None:
        """End the worker."""
        if not self._is_closed:
            self._is_closed = True
            try:
                self._connection.send(None)
                self.process.wait(CLOSE_SECONDS)
            except (OSError, subprocess.TimeoutExpired):
                pass  # it is killed
            self._end()

    def _lose(self, what: str) -> None:
        self._end()
        self._num_losses += 1
        reason = f"the worker process {what} (status {self.process.returncode})"
        if self._num_losses == 1:
            raise WorkerLost(reason)
        self._num_losses = 0
        raise EngineDead(f"{reason}, twice at the same step: its requests are ended")

    def _end(self) -> None:
        self._connection.close()
        self.process.kill()
        self.process.wait()
