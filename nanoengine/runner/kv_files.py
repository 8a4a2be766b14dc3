"""KVFiles: a thread that reads, deletes and writes files of K/V, one after the other, in the order in which it was told to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Condition

from nanoengine.engine.kv.disk_tier import MAX_UNWRITTEN
from nanoengine.engine.kv.kv_file import BadKVFile, read_kv_file, write_kv_file
from nanoengine.engine.messages import FileDone, FileRead, FileWrite

logger = logging.getLogger("nanoengine")


class KVFiles:
    """Nobody who gives it work waits for it, or hears of an exception. Every read and write is answered once, by a FileDone."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "nanoengine-kv-files")
        self._done: SimpleQueue[FileDone] = SimpleQueue()
        self._num_pending = 0  # not told by `finished` yet
        self._reading: set[str] = set()  # the same, of reads
        self._room = Condition()
        self._num_unwritten = 0  # bytes

    def read(self, order: FileRead, into: memoryview) -> None:
        """Read a file into memory that nobody touches meanwhile. Nothing happens if it is being read already."""
        if order.path in self._reading:
            return
        self._reading.add(order.path)
        try:
            self._begin(order.path, lambda: read_kv_file(Path(order.path), order.header, into))
        except BaseException:
            self._reading.discard(order.path)
            raise

    def write(self, order: FileWrite, content: memoryview) -> None:
        """Write memory that nobody else knows of."""
        with self._room:
            self._num_unwritten += len(content)

        def write() -> None:
            try:
                write_kv_file(Path(order.path), order.header, content)
            finally:
                with self._room:
                    self._num_unwritten -= len(content)
                    self._room.notify()

        self._begin(order.path, write)

    def wait_for_room(self, size: int) -> None:
        """Return when there is room for so many bytes that wait to be written."""
        with self._room:
            self._room.wait_for(lambda: not self._num_unwritten or self._num_unwritten + size <= MAX_UNWRITTEN)

    def refuse(self, order: FileWrite, reason: Exception) -> None:
        """Answer a write that cannot even begin."""

        def fail() -> None:
            raise OSError(f"it could not be set aside: {reason}")

        self._begin(order.path, fail)

    def delete(self, path: str) -> None:
        """Delete a file, if it is there. There is no answer."""
        self._thread.submit(_delete, path)

    def finished(self, wait: bool) -> list[FileDone]:
        """What is over since the last call."""
        done = []
        if wait and self._num_pending > 0:
            done.append(self._done.get())
        while True:
            try:
                done.append(self._done.get_nowait())
            except Empty:
                break
        self._num_pending -= len(done)
        self._reading.difference_update([each.path for each in done])
        return done

    def close(self) -> None:
        """Finish all that was begun."""
        self._thread.shutdown()

    def _begin(self, path: str, work: Callable[[], None]) -> None:
        self._thread.submit(self._run, path, work)
        self._num_pending += 1  # now, since nobody must wait for what was not begun

    def _run(self, path: str, work: Callable[[], None]) -> None:
        problem = None
        try:
            work()
        except (OSError, BadKVFile) as error:
            problem = str(error)
            logger.warning("ignored: %s: %s", path, problem)
        except Exception as error:  # somebody waits for an answer, whatever went wrong
            problem = repr(error)
            logger.exception("ignored: %s", path)
        self._done.put(FileDone(path, problem))


def _delete(path: str) -> None:
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("not deleted: %s: %s", path, error)
