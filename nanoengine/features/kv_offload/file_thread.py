"""FileThread: reads, writes and deletes files of K/V beside the steps, one after the other, in the order that it is given.

Nobody waits for it for long. What is not done within a time limit (a network file system that is gone) is answered as a problem;
until that work ends, reads and writes are refused. The thread does not keep the process from ending.
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
from nanoengine.features.kv_offload.messages import FileAnswer

logger = logging.getLogger("nanoengine")

MAX_UNWRITTEN = 256 << 20
"""Bytes of K/V that may wait in memory to be written."""

PAUSE = 60.0
"""Seconds without writing after a write has failed: the disk may be full."""


class Job(NamedTuple):
    kind: str  # of its answer; "": it has none
    name: str
    work: Callable[[], Tensor | None]  # returns the content of a file that was read
    size: int = 0  # bytes that wait to be written


class Done(NamedTuple):
    job: Job | None  # None: what happened beside it
    answer: FileAnswer
    content: Tensor | None = None  # of a file that was read


class FileThread:
    """Every read and write is answered once.

    Args:
        limit: seconds that one job may take.
    """

    def __init__(self, folder: KVFolder, limit: float = 10.0):
        self.folder, self.limit = folder, limit
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._done: SimpleQueue[Done] = SimpleQueue()
        self._asked: dict[tuple[str, str], Job] = {}  # reads and writes that are not answered, by kind and name
        self._changed = Condition()  # guards what follows
        self._num_jobs = self._num_unwritten = 0  # not ended; bytes
        self._began: float | None = None  # when the job that runs was begun
        self._next_write = 0.0  # after a write that failed
        self._thread = Thread(target=self._run, name="nanoengine-kv-files", daemon=True)
        self._thread.start()

    # ---- what the runner calls; none of it waits longer than the limit

    def read(self, name: str, header: bytes) -> None:
        """Read a file. Nothing happens if it is being read already."""
        if ("read", name) in self._asked:
            return
        if self._is_stuck():
            self._answer("read", name, "the folder does not answer")
            return

        def read() -> Tensor:
            content = torch.empty(self.folder.block_bytes, dtype=torch.uint8, device="cpu")
            self.folder.read(name, header, content.numpy().data)
            return content

        self._begin(Job("read", name, read))

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

        self._begin(Job("written", name, write, size))

    def delete(self, name: str) -> None:
        """Delete a file, if it is there. There is no answer."""
        self._begin(Job("", name, lambda: self.folder.delete(name)))

    def clear(self) -> None:
        """Delete all files of the model. There is no answer."""
        self._begin(Job("", "all files", self.folder.clear))

    def finished(self, patience: float) -> list[Done]:
        """The answers since the last call.

        Args:
            patience: seconds to wait for one, if any is to come.
        """
        come: list[Done] = []
        with suppress(Empty):
            if patience and self._asked:
                come.append(self._done.get(timeout=patience))
            while True:
                come.append(self._done.get_nowait())
        found = []
        for done in come:
            if done.job is not None:
                if self._asked.get(done.job[:2]) is not done.job:  # it comes too late
                    continue
                del self._asked[done.job[:2]]
            found.append(done)
        if self._asked and self._is_stuck():
            problem = f"no answer within {self.limit:.0f} s"
            logger.warning("%s: %s: it is not used until it does", self.folder.path, problem)
            found += [Done(None, FileAnswer(kind, name, problem)) for kind, name in self._asked]
            self._asked.clear()
        return found

    def wait_until_idle(self) -> bool:
        """Wait until all jobs have ended; False if one of them takes too long."""
        with self._changed:
            while self._num_jobs and not self._is_stuck():
                self._changed.wait(0.1)
            return not self._num_jobs

    def close(self) -> None:
        """Finish all that was begun."""
        self._jobs.put(None)
        if self.wait_until_idle():
            self._thread.join(self.limit)
        else:
            logger.warning("%s does not answer: %d files are left as they are", self.folder.path, self._num_jobs)

    # ---- jobs

    def _answer(self, kind: str, name: str, problem: str | None = None) -> None:
        """Say what needs no job."""
        self._done.put(Done(None, FileAnswer(kind, name, problem)))

    def _begin(self, job: Job) -> None:
        if job.kind:
            self._asked[job[:2]] = job
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
            except Exception as error:  # somebody waits for an answer, whatever went wrong
                problem = str(error) or repr(error)
                self._warn(job, problem)
            if job.kind:
                self._done.put(Done(job, FileAnswer(job.kind, job.name, problem), content))
            self._began = None
            with self._changed:
                self._num_jobs -= 1
                self._num_unwritten -= job.size
                self._changed.notify_all()

    def _warn(self, job: Job, problem: str) -> None:
        if job.kind != "written":
            logger.warning("ignored: %s in %s: %s", job.name, self.folder.path, problem)
            return
        if time.monotonic() >= self._next_write:
            logger.warning("%s: %s; no K/V is written for %.0f s", self.folder.path, problem, PAUSE)
        self._next_write = time.monotonic() + PAUSE
