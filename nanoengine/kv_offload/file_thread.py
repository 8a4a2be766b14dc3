"""FileThread: reads, writes and deletes files of K/V beside the steps, one after the other, in the order that it is given.

Nobody waits for it for long. What is not done within a time limit (a network file system that is gone) is answered as a problem;
until that work ends, reads and writes are refused. The thread does not keep the process from ending.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Condition, Thread
from typing import NamedTuple

import torch
from torch import Tensor

from nanoengine.kv_offload.kv_file import BadKVFile
from nanoengine.kv_offload.kv_folder import KVFolder
from nanoengine.kv_offload.messages import FileAnswer

logger = logging.getLogger("nanoengine")

MAX_UNWRITTEN = 256 << 20
"""Bytes of K/V that may wait in memory to be written."""

PAUSE = 60.0
"""Seconds without writing after a write has failed: the disk may be full."""


class Done(NamedTuple):
    number: int  # of the job
    answer: FileAnswer
    content: Tensor | None = None  # of a file that was read


class FileThread:
    """Every read and write is answered once.

    Args:
        limit: seconds that one job may take.
    """

    def __init__(self, folder: KVFolder, limit: float = 10.0):
        self.folder, self.limit = folder, limit
        self._jobs: SimpleQueue[tuple[int, int, Callable[[int], object]] | None] = SimpleQueue()
        self._done: SimpleQueue[Done] = SimpleQueue()
        self._asked: dict[int, tuple[str, str]] = {}  # jobs that are not answered: (kind, name)
        self._reading: set[str] = set()  # the names of the reads among them
        self._changed = Condition()  # guards what follows
        self._num_jobs = self._num_unwritten = 0  # not ended; bytes
        self._began: float | None = None  # when the job that runs was begun
        self._next_write = 0.0  # after a write that failed
        self._number = 0
        self._thread = Thread(target=self._run, name="nanoengine-kv-files", daemon=True)
        self._thread.start()

    # ---- what the runner calls; none of it waits longer than the limit

    def read(self, name: str, header: bytes) -> None:
        """Read a file. Nothing happens if it is being read already."""
        if name in self._reading:
            return
        self._reading.add(name)

        def read(number: int) -> None:
            content = torch.empty(self.folder.block_bytes, dtype=torch.uint8)
            problem = self._problem(name, lambda: self.folder.read(name, header, content.numpy().data))
            self._done.put(Done(number, FileAnswer("read", name, problem), None if problem else content))

        self._begin("read", name, read)

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
                self._done.put(Done(self._new("written", name), FileAnswer("written", name, "refused")))
                return
        try:
            block = content()
        except RuntimeError as error:  # out of memory: only the file is lost
            self._done.put(Done(self._new("written", name), FileAnswer("written", name, str(error))))
            return

        def write(number: int) -> None:
            gone: list[str] = []
            problem = None
            try:
                gone = self.folder.write(name, header, block.numpy().data)
            except OSError as error:
                problem = str(error)
                if time.monotonic() >= self._next_write:
                    logger.warning("%s: %s; no K/V is written for %.0f s", self.folder.path, problem, PAUSE)
                self._next_write = time.monotonic() + PAUSE
            for other in gone:
                self._done.put(Done(0, FileAnswer("gone", other)))
            self._done.put(Done(number, FileAnswer("written", name, problem)))

        self._begin("written", name, write, size)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there. There is no answer."""
        self._begin("", name, lambda _: self._problem(name, lambda: self.folder.delete(name)))

    def clear(self) -> None:
        """Delete all files of the model. There is no answer."""
        self._begin("", "all files", lambda _: self._problem("all files", self.folder.clear))

    def finished(self, patience: float) -> list[Done]:
        """The answers since the last call.

        Args:
            patience: seconds to wait for one, if any is to come.
        """
        found: list[Done] = []
        try:
            if patience and self._asked:
                found.append(self._done.get(timeout=patience))
            while True:
                found.append(self._done.get_nowait())
        except Empty:
            pass
        found = [done for done in found if not done.number or self._asked.pop(done.number, None) is not None]
        if self._asked and self._is_stuck():
            logger.warning(
                "%s does not answer within %.0f s: it is not used until it does", self.folder.path, self.limit
            )
            problem = f"no answer within {self.limit:.0f} s"
            found += [Done(number, FileAnswer(kind, name, problem)) for number, (kind, name) in self._asked.items()]
            self._asked.clear()
        self._reading.difference_update([done.answer.name for done in found if done.answer.kind == "read"])
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

    def _new(self, kind: str, name: str) -> int:
        self._number += 1
        if kind:
            self._asked[self._number] = kind, name
        return self._number

    def _begin(self, kind: str, name: str, work: Callable[[int], object], size: int = 0) -> None:
        number = self._new(kind, name)
        if kind == "read" and self._is_stuck():
            self._done.put(Done(number, FileAnswer(kind, name, "the folder does not answer")))
            return
        with self._changed:
            self._num_jobs += 1
            self._num_unwritten += size
        self._jobs.put((number, size, work))

    def _has_room(self, size: int) -> bool:
        return not self._num_unwritten or self._num_unwritten + size <= MAX_UNWRITTEN

    def _is_stuck(self) -> bool:
        began = self._began
        return began is not None and time.monotonic() - began > self.limit

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            number, size, work = job
            self._began = time.monotonic()
            try:
                work(number)
            except Exception as error:  # somebody waits for an answer, whatever went wrong
                logger.exception("a file of K/V: job %d", number)
                if number in self._asked:
                    self._done.put(Done(number, FileAnswer(*self._asked[number], repr(error))))
            self._began = None
            with self._changed:
                self._num_jobs -= 1
                self._num_unwritten -= size
                self._changed.notify_all()

    def _problem(self, name: str, work: Callable[[], object]) -> str | None:
        """Do some work; returns what went wrong."""
        try:
            work()
        except (OSError, BadKVFile) as error:
            logger.warning("ignored: %s in %s: %s", name, self.folder.path, error)
            return str(error)
        return None
