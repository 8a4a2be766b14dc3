"""FileThread: reads, writes and deletes files of K/V beside the steps, one after the other, in the order of the calls.

No caller waits for long. A job that does not end within a time limit (a network file system that is gone) is reported as a
problem; until it ends, reads and writes are refused. The thread does not keep the process from ending.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Condition, Thread
from typing import NamedTuple

import torch
from torch import Tensor

from nanoengine.features.kv_offload.kv_folder import KVFolder
from nanoengine.features.kv_offload.messages import FileOutcome

logger = logging.getLogger("nanoengine")

MAX_UNWRITTEN = 256 << 20
"""Bytes of K/V that may wait in memory to be written."""

PAUSE = 60.0
"""Seconds without writing after a write has failed: the disk may be full."""


class FileJob(NamedTuple):
    kind: str  # of its outcome; "": it reports none
    name: str
    work: Callable[[], Tensor | None]  # returns the content of a file that was read
    size: int = 0  # bytes that wait to be written


class FinishedJob(NamedTuple):
    job: FileJob | None  # None: an outcome without a job
    answer: FileOutcome
    content: Tensor | None = None  # of a file that was read


class FileThread:
    """Every read and write has one outcome.

    Args:
        limit: seconds that one job may take.
    """

    def __init__(self, folder: KVFolder, limit: float = 10.0):
        self.folder, self.limit = folder, limit
        self._jobs: SimpleQueue[FileJob | None] = SimpleQueue()
        self._done: SimpleQueue[FinishedJob] = SimpleQueue()
        self._pending: dict[tuple[str, str], FileJob] = {}  # reads and writes without an outcome, by kind and name
        self._changed = Condition()  # guards the following counts
        self._num_jobs = self._num_unwritten = 0  # jobs that have not ended; bytes
        self._began: float | None = None  # when the running job began
        self._next_write = 0.0  # after a write that failed
        self._thread = Thread(target=self._run, name="nanoengine-kv-files", daemon=True)
        self._thread.start()

    # ---- called by the runner; no call waits longer than the limit

    def read(self, name: str, header: bytes) -> None:
        """Read a file, unless it is being read already."""
        if ("read", name) in self._pending:
            return
        if self._is_stuck():
            self._answer("read", name, "the folder does not answer")
            return

        def read() -> Tensor:
            content = torch.empty(self.folder.block_bytes, dtype=torch.uint8, device="cpu")
            self.folder.read(name, header, content.numpy().data)
            return content

        self._begin(FileJob("read", name, read))

    def write(self, name: str, header: bytes, content: Callable[[], Tensor], *, waits: bool) -> None:
        """Write a block to a file.

        Args:
            content: makes a copy of it, [block_bytes] uint8 on the CPU.
            waits: until there is room for the copy; otherwise the write is refused.
        """
        size = self.folder.block_bytes
        with self._changed:
            while waits and not self._has_room(size) and not self._is_stuck():
                self._changed.wait(0.1)
            if not self._has_room(size) or self._is_stuck() or time.monotonic() < self._next_write:
                self._answer("written", name, "refused")
                return
        try:
            block = content()
        except RuntimeError as error:  # out of memory: only the file is lost
            self._answer("written", name, str(error))
            return

        def write() -> None:
            for gone in self.folder.write(name, header, block.numpy().data):
                self._answer("gone", gone)

        self._begin(FileJob("written", name, write, size))

    def delete(self, name: str) -> None:
        """Delete a file, if it exists. There is no outcome."""
        self._begin(FileJob("", name, lambda: self.folder.delete(name)))

    def clear(self) -> None:
        """Delete all files of the model. There is no outcome."""
        self._begin(FileJob("", "all files", self.folder.clear))

    def finished(self, patience: float) -> list[FinishedJob]:
        """The outcomes since the last call.

        Args:
            patience: seconds to wait for one, if any is to come.
        """
        received: list[FinishedJob] = []
        with suppress(Empty):
            if patience and self._pending:
                received.append(self._done.get(timeout=patience))
            while True:
                received.append(self._done.get_nowait())
        in_time = []
        for done in received:
            if done.job is not None:
                if self._pending.get(done.job[:2]) is not done.job:  # it is late
                    continue
                del self._pending[done.job[:2]]
            in_time.append(done)
        if self._pending and self._is_stuck():
            problem = f"no answer within {self.limit:.0f} s"
            logger.warning("%s: %s: it is not used until it does", self.folder.path, problem)
            in_time += [FinishedJob(None, FileOutcome(kind, name, problem)) for kind, name in self._pending]
            self._pending.clear()
        return in_time

    def wait_until_idle(self) -> bool:
        """Wait until all jobs have ended; False if one of them takes too long."""
        with self._changed:
            while self._num_jobs and not self._is_stuck():
                self._changed.wait(0.1)
            return not self._num_jobs

    def close(self) -> None:
        """Finish all jobs."""
        self._jobs.put(None)
        if self.wait_until_idle():
            self._thread.join(self.limit)
        else:
            logger.warning("%s does not answer: %d files are left as they are", self.folder.path, self._num_jobs)

    # ---- jobs

    def _answer(self, kind: str, name: str, problem: str | None = None) -> None:
        """Report an outcome without a job."""
        self._done.put(FinishedJob(None, FileOutcome(kind, name, problem)))

    def _begin(self, job: FileJob) -> None:
        if job.kind:
            self._pending[job[:2]] = job
        with self._changed:
            self._num_jobs += 1
            self._num_unwritten += job.size
        self._jobs.put(job)

    def _has_room(self, size: int) -> bool:
        return not self._num_unwritten or self._num_unwritten + size <= MAX_UNWRITTEN

    def _is_stuck(self) -> bool:
        began = self._began
        return began is not None and time.monotonic() - began > self.limit

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._began = time.monotonic()
            content, problem = None, None
            try:
                content = job.work()
            except Exception as error:  # a sequence may wait for the outcome
                problem = str(error) or repr(error)
                self._warn(job, problem)
            if job.kind:
                self._done.put(FinishedJob(job, FileOutcome(job.kind, job.name, problem), content))
            self._began = None
            with self._changed:
                self._num_jobs -= 1
                self._num_unwritten -= job.size
                self._changed.notify_all()

    def _warn(self, job: FileJob, problem: str) -> None:
        if job.kind != "written":
            logger.warning("ignored: %s in %s: %s", job.name, self.folder.path, problem)
            return
        if time.monotonic() >= self._next_write:
            logger.warning("%s: %s; no K/V is written for %.0f s", self.folder.path, problem, PAUSE)
        self._next_write = time.monotonic() + PAUSE
