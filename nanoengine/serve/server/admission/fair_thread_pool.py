"""Turns: work of which one piece may take a second, done beside all other work, and by every client in its turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from nanoengine.serve.server.admission.work_share import WorkShare

T = TypeVar("T")


class Turns:
    """A fair pool of threads: at most `of_client` pieces of a client are worked on at a time, and its next one waits in one line
    with those of all others.

    Args:
        num_threads: pieces that are worked on at once.
        of_client: those of one client.
        share: is charged with what the threads work.
    """

    def __init__(self, num_threads: int, of_client: int, share: WorkShare | None = None) -> None:
        self._share = WorkShare() if share is None else share
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="turns")
        self._free = asyncio.Semaphore(num_threads)
        self._of_client = of_client
        self._clients: dict[str, asyncio.Semaphore] = {}
        self._num_pieces: Counter[str] = Counter()  # of each client, waiting or worked on

    async def run(self, client: str, function: Callable[[], T]) -> T:
        """The result of a function, called in one of the threads."""
        self._num_pieces[client] += 1
        own = self._clients.setdefault(client, asyncio.Semaphore(self._of_client))
        try:
            async with own, self._free:
                took: list[float] = []
                piece = asyncio.get_running_loop().run_in_executor(self._pool, self._timed, function, took)
                try:
                    return await asyncio.shield(piece)
                except asyncio.CancelledError:
                    await asyncio.wait([piece])  # a thread cannot be stopped: its place is taken until it is done
                    raise
                finally:
                    self._share.charge(client, sum(took))
        finally:
            self._num_pieces[client] -= 1
            if not self._num_pieces[client]:
                del self._num_pieces[client], self._clients[client]

    def _timed(self, function: Callable[[], T], took: list[float]) -> T:
        start = self._share.worked()
        try:
            return function()
        finally:
            took.append(self._share.worked() - start)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
