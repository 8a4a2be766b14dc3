"""Processes of Python that begin with torch and the engine imported: forks of one process that has done so, once for all tests.

A new interpreter takes most of its time for these imports. What tests the start of an interpreter itself has a real one
(`subprocess`), and so has the first of each kind of process. A fork ends as a process of its own does: its threads are waited
for, its streams are flushed, and its status is the one that `subprocess` would tell.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

from nanoengine.log import child_log_arguments

IS_LINUX = sys.platform == "linux"
ROOT = Path(__file__).parent.parent
IMPORTED = ("torch", "numpy.random", "nanoengine.llm", "nanoengine.core.startup", "nanoengine.models.description")
OFTEN = ("nanoengine.serve.chat.terminal", "tests.scale.replicas.world")
"""What several kinds of forks import, if no folder of it was deleted."""

MOST_BYTES, MOST_DESCRIPTORS = 1 << 20, 16
STREAMS = ("stdin", "stdout", "stderr")


class Forked:
    """A process that runs `python -m MODULE arguments`, or `python -c CODE arguments`.

    Args:
        command: what follows the name of the interpreter.
        streams: the files of its standard streams, or None for one that is closed.
        descriptors: open files that it inherits, with their numbers.
        own_session: it is the first of a session of its own, as with `start_new_session`; and if its standard input is a
            terminal, that is the terminal of the session.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        streams: Sequence[int | None] = (0, 1, 2),
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
        own_session: bool = False,
    ):
        self.returncode: int | None = None
        self._lock = threading.Lock()
        facts, told = os.pipe()
        given = {number: own for number, own in enumerate(streams) if own is not None}
        given |= {number: number for number in descriptors}
        variables = dict(os.environ if environment is None else environment)
        order = [list(given), list(command), variables, str(folder), own_session]
        message = json.dumps(order).encode()
        assert len(message) < MOST_BYTES
        with _lock:
            socket.send_fds(_zygote(), [message], [told, *given.values()])
        os.close(told)
        self._facts: IO[str] = os.fdopen(facts)
        self.pid = int(self._facts.readline())

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, or the number of the signal that has ended it, below 0.

        Raises:
            TimeoutExpired: it runs after so many seconds.
        """
        with self._lock:
            if self.returncode is None:
                if not select.select([self._facts], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0)
                self.returncode = int(self._facts.readline())
                self._facts.close()
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def begin(command: Sequence[str], *descriptors: int) -> Any:
    """A fork, or where Linux is not, a process of `subprocess`, which inherits open files."""
    if IS_LINUX:
        return Forked(command, descriptors=descriptors)
    return subprocess.Popen([sys.executable, *command], pass_fds=descriptors, cwd=ROOT)


def run_forked(
    command: Sequence[str],
    *,
    given: bytes = b"",
    streams: Mapping[int, int | None] | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` does, with bytes on standard input, and output and errors captured where they are not closed.

    Args:
        streams: other files for standard streams, by their numbers; None closes a stream.
        options: of `Forked`.
    """
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        file.write(given)
        file.seek(0)
        files = dict(enumerate(each.fileno() for each in (file, out, err))) | dict(streams or {})
        status = Forked(command, streams=list(files.values()), **options).wait()
        texts = []
        for each in (out, err):
            each.seek(0)
            texts.append(each.read().decode())
    return subprocess.CompletedProcess(list(command), status, *texts)


def start_child(
    module: str, *descriptors: int, environment: Mapping[str, str] | None = None
) -> tuple[Forked, socket.socket]:
    """What nanoengine.scale.worker.child.start_child does."""
    own, other = socket.socketpair()
    with other, open(os.devnull) as null:
        command = ["-m", module, str(other.fileno()), *child_log_arguments()]
        forked = Forked(
            command,
            streams=(null.fileno(), 1, 2),
            descriptors=(other.fileno(), *descriptors),
            environment=os.environ | (environment or {}),
            folder=Path.cwd(),
        )
    return forked, own


_lock = threading.Lock()


@cache
def _zygote() -> socket.socket:
    """A socket to the process that forks; it ends with this one."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        command = [sys.executable, "-m", "tests.forks", str(other.fileno())]
        subprocess.Popen(command, cwd=ROOT, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL)
    return own


# ---- in the process that forks


def serve(link: socket.socket) -> None:
    """Fork for each order. A fork returns, and ends as every Python does, when it has run what was asked for."""
    for name in IMPORTED:
        import_module(name)
    for name in OFTEN:
        with contextlib.suppress(ImportError):
            import_module(name)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for a fork
    while True:
        order, descriptors, *_ = socket.recv_fds(link, MOST_BYTES, MOST_DESCRIPTORS)
        if not order:
            return None
        if not os.fork():
            link.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            told, *others = descriptors
            if pid := os.fork():
                _wait(pid, told, others)
            os.close(told)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return _run(others, *json.loads(order))
        for number in descriptors:
            os.close(number)


def _wait(pid: int, told: int, others: list[int]) -> NoReturn:
    """Tell the number of a fork, and how it ends."""
    for number in others:
        os.close(number)
    os.write(told, f"{pid}\n".encode())
    os.write(told, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
    os._exit(0)


def _run(
    descriptors: list[int],
    numbers: list[int],
    command: list[str],
    variables: dict[str, str],
    folder: str,
    own_session: bool,
) -> None:
    import fcntl  # not everywhere
    import termios

    aside = [fcntl.fcntl(own, fcntl.F_DUPFD_CLOEXEC, 100) for own in descriptors]
    for number in (*descriptors, 0, 1, 2):
        os.close(number)
    for own, number in zip(aside, numbers, strict=True):
        os.dup2(own, number)
        os.close(own)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    if own_session:
        os.setsid()
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    _open_streams(numbers)
    kind, name, *arguments = command
    sys.argv = [kind, *arguments]
    if kind == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})


def _open_streams(numbers: list[int]) -> None:
    """As Python does when it starts."""
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    for number, name in enumerate(STREAMS):
        stream = None
        if number in numbers:
            stream = open(  # noqa: SIM115  # until the process ends
                number,
                "w" if number else "r",
                buffering=1 if number == 2 or os.isatty(number) else -1,
                encoding=encoding or "utf-8",
                errors="backslashreplace" if number == 2 else errors or "strict",
                closefd=False,
            )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
