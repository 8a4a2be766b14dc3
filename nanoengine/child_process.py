"""ChildProcess: a Python program in a process with limits, which answers questions one at a time. A question that is too much for
it ends this process and nothing else.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

MAX_DYING = 0.5
"""Seconds that a process has to end by itself: its exit status then says the cause."""

MAX_KILLING = 30.0
"""Seconds to wait for a killed process. A process that waits for a disk ends later."""


class ProcessEnded(Exception):
    """The process has ended, or has not answered in time. The message is a predicate, such as "ended with status 3 ()".

    Attributes:
        status: exit status, negative for a signal; None: it did not end by itself, or was never started.
        is_set_up: whether it had answered `setup`, so that this question may be the cause.
    """

    def __init__(self, status: int | None, is_set_up: bool, error: Exception):
        words = "did not go on" if status is None else f"ended with status {status}"
        if status is not None and status < 0:
            words = f"was ended by {signal_name(-status)}"
        super().__init__(f"{words} ({error})")
        self.status, self.is_set_up = status, is_set_up


def signal_name(number: int) -> str:
    """Such as SIGKILL; of signals without a name, the number."""
    try:
        return signal.Signals(number).name
    except ValueError:  # of real time
        return f"signal {number}"


class ChildProcess:
    """The process starts with the first question. After its end, and in a fork of this process, the next question starts another.
    Any thread may call it.

    Args:
        command: starts the program; the descriptor of its end of a `multiprocessing.connection` is added as the last argument.
        max_wait: seconds until an answer must be there, however busy the machine is.
        max_answer_bytes: a longer answer counts as none. None: no limit.
        setup: the first question to each new process; its answer is dropped. None: there is none.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        max_wait: float,
        max_answer_bytes: int | None = None,
        setup: bytes | None = None,
    ):
        self.command, self.max_wait, self.max_answer_bytes, self.setup = command, max_wait, max_answer_bytes, setup
        self.process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], int | None] = lambda: None  # of the process that was started last
        self._lock, self._is_closed = threading.Lock(), False

    def ask(self, question: bytes) -> bytes:
        """Returns the answer.

        Raises:
            ProcessEnded: there is none; the process has ended.
        """
        with self._lock:
            is_set_up = False
            try:
                self._start()
                is_set_up = True
                return self._exchange(question)
            except BaseException as error:  # a late answer would count as that of the next question
                status = self._stop()
                if not isinstance(error, OSError | EOFError):
                    raise
                raise ProcessEnded(status, is_set_up, error) from error

    def close(self) -> None:
        """End the process, and start no other. The answer to a question of another thread is not waited for."""
        self._is_closed = True
        if (process := self.process) is not None:
            process.kill()
        with self._lock:
            self._stop()

    def _start(self) -> None:
        if self.process is not None and self.process.poll() is None:  # a fork has no such child: 0
            return
        self._stop()
        if self._is_closed:
            raise OSError("it was closed")
        self._connection, theirs = Pipe()
        with theirs:
            command, silent = [*self.command, str(theirs.fileno())], subprocess.DEVNULL
            try:  # in another group: Ctrl-C is for this process
                self.process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], process_group=0, stdin=silent, stdout=silent, stderr=silent
                )
            except BaseException:
                self._connection.close()
                raise
        self._end = weakref.finalize(self, _end, self.process, self._connection)
        if self.setup is not None:
            self._exchange(self.setup)

    def _exchange(self, question: bytes) -> bytes:
        self._connection.send_bytes(question)
        if not self._connection.poll(self.max_wait):
            raise TimeoutError(f"no answer after {self.max_wait:g} s")
        return self._connection.recv_bytes(self.max_answer_bytes)

    def _stop(self) -> int | None:
        """Returns the exit status of a process that has ended by itself."""
        self.process = None
        return self._end()


def _end(process: subprocess.Popen[bytes], connection: Connection) -> int | None:
    connection.close()
    with suppress(subprocess.TimeoutExpired):
        return process.wait(MAX_DYING)  # 0 in a fork
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(MAX_KILLING)
    return None
