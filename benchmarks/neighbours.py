"""Busy processes beside the one that is measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:  # an orphan ends
    for _ in range(1_000_000):
        pass
"""


class Neighbours:
    """So many processes that want a CPU each; they are stopped but while they are let loose. To be closed by `with`."""

    def __init__(self, count: int):
        command = [sys.executable, "-S", "-c", BUSY]
        self._processes = [subprocess.Popen(command) for _ in range(count)]
        self._tell(signal.SIGSTOP)

    def __enter__(self) -> Neighbours:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    @contextmanager
    def let_loose(self) -> Iterator[None]:
        self._tell(signal.SIGCONT)
        try:
            yield
        finally:
            self._tell(signal.SIGSTOP)

    def _tell(self, what: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(what)


def fair_share(threads: int, neighbours: int) -> float:
    """What is left of the CPU time of so many threads if all who want a CPU get the same: 1 where there are CPUs for all."""
    cpus = len(os.sched_getaffinity(0))
    return min(1.0, cpus / (threads + neighbours)) / min(1.0, cpus / threads)
