"""Turns: work of which one piece may take a second, done beside all other work, and by every client in its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from nanoengine.serve.server.errors import RETRY_AFTER, Problem
from nanoengine.serve.server.quota import Quota
from nanoengine.serve.server.work_share import WorkShare

T = TypeVar("T")

ANY = 1 << 62
"""A number that no client reaches."""


class Turns:
    """Threads for pieces of work. A client has a few pieces at a time in them, and waits in one line with all others for the
    next:
    however much one asks for, another waits for as many of each client, and no more.

    Args:
        num_threads: pieces that are worked on at once.
        of_client: those of one client.
        most_waiting: pieces that one client may have waiting. None: any number.
        what: it waits for.
        share: is charged with what the threads work.
    """

    def __init__(
        self,
        num_threads: int,
        of_client: int,
        most_waiting: int | None = None,
        what: str = "",
        share: WorkShare | None = None,
    ) -> None:
        self._share = WorkShare() if share is None else share
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="turns")
        self._free = asyncio.Semaphore(num_threads)
        self._of_client, self._what = of_client, what
        self._clients: dict[str, asyncio.Semaphore] = {}
        self._pieces = Quota(ANY, None if most_waiting is None else most_waiting + 1)  # one is worked on

    async def run(self, client: str, function: Callable[[], T]) -> T:
        """The result of a function, called in one of the threads.

        Raises:
            Problem: this client has too many waiting.
        """
        if not self._pieces.has_room(client):
            message = f"{self._pieces.of_clients[client] - 1} requests of yours wait for {self._what}: try again later"
            raise Problem(503, message, headers=RETRY_AFTER)
        self._pieces.take(client)
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
            self._pieces.give_back(client)
            if client not in self._pieces.of_clients:
                del self._clients[client]

    def _timed(self, function: Callable[[], T], took: list[float]) -> T:
        start = self._share.worked()
        try:
            return function()
        finally:
            took.append(self._share.worked() - start)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
