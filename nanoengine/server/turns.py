"""Turns: work of which one piece may take a second, done beside all other work, and by every client in its turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from nanoengine.server.errors import Problem

T = TypeVar("T")

NUM_THREADS = 2
"""So that one client never has all of them."""

MAX_WAITING = 64
"""Pieces that one client may have waiting."""


class Turns:
    """Threads for pieces of work. A client has one piece at a time in them, and waits in one line with all others for the next:
    however much one asks for, another waits for a piece of each client, and no more.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="turns")
        self._free = asyncio.Semaphore(NUM_THREADS)
        self._clients: dict[str, asyncio.Lock] = {}
        self._num_pieces: Counter[str] = Counter()  # by client, the one that is worked on included

    async def run(self, client: str, function: Callable[[], T]) -> T:
        """The result of a function, called in one of the threads.

        Raises:
            Problem: this client has too many waiting.
        """
        if self._num_pieces[client] > MAX_WAITING:
            message = (
                f"{MAX_WAITING} requests of yours with structured outputs wait for their grammars: try again later"
            )
            raise Problem(503, message, headers={"retry-after": "1"})
        self._num_pieces[client] += 1
        own = self._clients.setdefault(client, asyncio.Lock())
        try:
            async with own, self._free:
                piece = asyncio.get_running_loop().run_in_executor(self._pool, function)
                try:
                    return await asyncio.shield(piece)
                except asyncio.CancelledError:
                    await asyncio.wait([piece])  # a thread cannot be stopped: its place is taken until it is done
                    raise
        finally:
            self._num_pieces[client] -= 1
            if not self._num_pieces[client]:
                del self._num_pieces[client], self._clients[client]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
