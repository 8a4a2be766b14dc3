"""Child processes of this package: start, signs of life and end. A socket connects parent and child."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nanoengine.child_process import signal_name
from nanoengine.log import child_log_arguments, show_log

logger = logging.getLogger("nanoengine")

LIFE_SECONDS = 1.0
"""Interval between the signs of life of a process that starts."""

START_SILENCE_SECONDS = 60.0
"""Limit of silence of a process that starts; it is killed then. Loading a library may hold up its threads."""

REAP_SECONDS = 5.0
"""Limit of the wait for a killed process: the kernel may hold it, for a device or a disk."""


def start_child(
    module: str, *descriptors: int, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run a module in a process with a socket to this one. Its arguments are the descriptor of the socket, and the arguments
    of `show_log`. It imports nothing from the working folder, which may be the folder of a model.

    Args:
        descriptors: open files that it inherits.
        environment: variables of the process, which override the environment of this one.
    """
    parent_end, child_end = socket.socketpair()
    root = str(Path(__file__).parents[3])
    paths = os.pathsep.join(filter(None, (root, *os.environ.get("PYTHONPATH", "").split(os.pathsep))))
    with child_end:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(child_end.fileno()), *child_log_arguments()],
            pass_fds=[child_end.fileno(), *descriptors],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
        )
    return process, parent_end


def end_children(*processes: subprocess.Popen[bytes]) -> None:
    """Kill processes, and wait at most `REAP_SECONDS` for each to be gone."""
    for process in processes:
        process.kill()
    for process in processes:
        try:
            process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.error(
                "process %d was killed, and is not gone after %g seconds: it is left", process.pid, REAP_SECONDS
            )


def ending_of(process: subprocess.Popen[bytes]) -> str:
    """Text about the end of a process whose socket is closed, such as "was killed by SIGKILL"."""
    try:
        status = process.wait(0.5)
    except subprocess.TimeoutExpired:
        return "has closed its socket"
    if status >= 0:
        return f"has ended with exit code {status}"
    return f"was killed by {signal_name(-status)}"


# ---- in the process


def connect_to_parent() -> Connection:
    """The connection of a child to its parent, by the arguments of `start_child`. From now on the child logs as its parent does,
    and leaves signals to it.
    """
    show_log(*sys.argv[2:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent handles them, and ends this process
        signal.signal(number, signal.SIG_IGN)
    return Connection(int(sys.argv[1]))


@contextmanager
def signs_of_life(send: Callable[[], object]) -> Iterator[None]:
    """Call `send` at once and then every `LIFE_SECONDS`, from another thread, while the body of the `with` runs."""
    is_over = threading.Event()

    def repeat() -> None:
        with suppress(OSError):  # the other side is gone
            send()
            while not is_over.wait(LIFE_SECONDS):
                send()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def receive(connection: Connection) -> Any:
    """The next message from the process that started this one. This process ends when the other is gone, or when a message
    cannot be read.
    """
    try:
        return connection.recv()
    except (EOFError, OSError):
        os._exit(0)  # also in the middle of a step: its result has no reader
    except Exception:
        logger.critical("process %d ends: it cannot read a message", os.getpid(), exc_info=True)
        os._exit(1)


def portable(error: Exception) -> Exception:
    """The error itself if it can be pickled, otherwise a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as problem:  # raised by a part of the error
        return RuntimeError(f"{type(error).__name__}: {error} ({problem})")
    return error
