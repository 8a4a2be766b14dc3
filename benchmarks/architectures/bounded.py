"""A judgement in a process of its own, with a time limit."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.architectures.checkpoints import make
from benchmarks.architectures.judge import Outcome, crash, judge
from benchmarks.architectures.sizes import NO_GENERATORS

SECONDS = 60


def judge_architecture(name: str, seconds: float = SECONDS, **options: Any) -> Outcome:
    """Make the checkpoint of an architecture and judge it.

    Args:
        seconds: after so many the process is killed, which is a crash.
        options: of `judge`.
    """
    if name in NO_GENERATORS:
        return Outcome("not made", NO_GENERATORS[name])
    with TemporaryDirectory(prefix="architecture-") as folder:
        return in_child(lambda: _make_and_judge(name, Path(folder), **options), seconds)


def _make_and_judge(name: str, folder: Path, **options: Any) -> Outcome:
    try:
        make(name, folder)
    except Exception as error:
        return Outcome("not made", crash(error).reason)
    return judge(folder, **options)


def in_child(function: Callable[[], Outcome], seconds: float) -> Outcome:
    """What a function returns in a fork of this process, whose imports it has; its output is dropped."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        try:
            os.setsid()
            os.close(reader)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            try:
                outcome = function()
            except Exception as error:
                outcome = crash(error)
            os.write(writer, pickle.dumps(outcome))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as result:
        start = time.perf_counter()
        ready = select.select([result], [], [], seconds)[0]
        message = result.read() if ready else b""
    with contextlib.suppress(ProcessLookupError):  # it, and what it has started
        os.killpg(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if message:
        return pickle.loads(message)
    waited = time.perf_counter() - start
    return Outcome("crash", f"no result after {waited:.0f} s" if not ready else f"the process ended, status {status}")
