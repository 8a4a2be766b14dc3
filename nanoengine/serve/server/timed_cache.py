"""TimedCache: the result of an asynchronous function, cached for some seconds, so that many callers cost the engine one call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class TimedCache(Generic[T]):
    """Used on one event loop. Concurrent callers wait for one call.

    Args:
        make: makes the value.
        seconds: the age of the value, at most.
    """

    def __init__(self, make: Callable[[], Awaitable[T]], seconds: float):
        self._make, self.seconds = make, seconds
        self._made: tuple[float, T] | None = None
        self._lock = asyncio.Lock()

    async def get(self) -> T:
        async with self._lock:
            now = time.monotonic()
            if self._made is None or now - self._made[0] >= self.seconds:
                self._made = (now, await self._make())
            return self._made[1]
