"""Memory of the KV pool that the system clears while the engine is idle, and not while a prompt waits for it."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
import weakref

from nanoengine.core.messages import StepPlan, StepResult
from nanoengine.core.model_runner import RunnerPart
from nanoengine.kernels.kv_cache import BlockMajorKVCache
from nanoengine.kernels.memory import HUGE_PAGE
from nanoengine.ram import available_ram

MADV_POPULATE_WRITE = 23
"""Of madvise(2), since Linux 5.14: as if every page were written; what is in them stays."""

AHEAD_TOKENS, AHEAD_BYTES = 1024, 128 << 20
"""Behind the highest block that was in use, whichever is less: so much memory may be taken that nobody ever needs."""

LEAST_RAM = 1 << 30
"""Bytes that must be left to this process, or its container: with less, no memory is taken before it is needed."""

QUIET_SECONDS = 1.0
"""Since the last step, after which an engine is idle."""


class Prefault(RunnerPart):
    """Takes the memory of the blocks that are used next, in a thread that stands still while there are steps, and ends when all
    is taken. Blocks that were never used are handed out in their order.

    It goes by huge pages: a step that begins meanwhile waits for one of them, if it needs the system's memory at all.

    Args:
        num_ahead: blocks behind the highest one in use.
    """

    def __init__(self, cache: BlockMajorKVCache, num_ahead: int):
        self._cache = weakref.ref(cache)  # an engine that is forgotten gives its memory back
        self._block_bytes = cache.pool[0].nbytes
        self._ahead = min(num_ahead * self._block_bytes, AHEAD_BYTES)
        self._taken = self._wanted = 0  # bytes from the beginning of the pool on
        self._busy_until = 0.0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._want(0)

    def begin(self, plan: StepPlan) -> None:
        self._busy_until = math.inf
        tables = [table for started in plan.started for table in started.tables]
        tables += [entries.block_ids for entries in plan.tables]
        if tables:
            self._want(max(max(table, default=0) for table in tables))

    def end(self, result: StepResult) -> None:
        self._busy_until = time.monotonic() + QUIET_SECONDS

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _want(self, block: int) -> None:
        used = (block + 1) * self._block_bytes
        self._taken = max(self._taken, used // HUGE_PAGE * HUGE_PAGE)  # who uses them takes them
        self._wanted = max(self._wanted, used + self._ahead)
        if self._taken < self._wanted and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._take, name="nanoengine-prefault", daemon=True)
            self._thread.start()

    def _take(self) -> None:
        while not self._closing.is_set() and (cache := self._cache()) is not None:
            start, pool = self._taken, cache.pool
            size = min(HUGE_PAGE, pool.nbytes - start)
            if size <= 0 or start >= self._wanted:
                break
            if time.monotonic() < self._busy_until:
                del cache, pool
                self._closing.wait(QUIET_SECONDS)
            elif available_ram() < LEAST_RAM or not populate(pool.data_ptr() + start, size):
                self._closing.set()
            else:
                self._taken = max(self._taken, start + HUGE_PAGE)


def populate(address: int, size: int) -> bool:
    """Have the system give memory to pages; False: it cannot be asked, or has none."""
    if sys.platform != "linux":
        return False
    return not ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_POPULATE_WRITE)
