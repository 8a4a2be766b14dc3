"""FairThreadPool: threads for functions that may take a second, scheduled fairly among clients."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from nanoengine.serve.server.admission.work_share import WorkShare

T = TypeVar("T")


class FairThreadPool:
    """A thread pool that runs at most `of_client` functions of a client at a time; the next one waits in the common queue.

    Args:
        num_threads: functions that run at once.
        of_client: functions of one client that run at once.
        accounts: charged with the seconds that the threads work.
    """

    def __init__(self, num_threads: int, of_client: int, accounts: WorkShare | None = None) -> None:
        self._accounts = WorkShare() if accounts is None else accounts
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="fair")
        self._free = asyncio.Semaphore(num_threads)
        self._of_client = of_client
        self._clients: dict[str, asyncio.Semaphore] = {}
        self._num_functions: Counter[str] = Counter()  # of each client, waiting or running

    async def run(self, client: str, function: Callable[[], T]) -> T:
        """The result of a function, called in one of the threads."""
        self._num_functions[client] += 1
        of_client = self._clients.setdefault(client, asyncio.Semaphore(self._of_client))
        try:
            async with of_client, self._free:
                seconds: list[float] = []
                future = asyncio.get_running_loop().run_in_executor(self._pool, self._timed, function, seconds)
                try:
                    return await asyncio.shield(future)
                except asyncio.CancelledError:
                    await asyncio.wait([future])  # a thread cannot be stopped: it is in use until the function returns
                    raise
                finally:
                    self._accounts.charge(client, sum(seconds))
        finally:
            self._num_functions[client] -= 1
            if not self._num_functions[client]:
                del self._num_functions[client], self._clients[client]

    def _timed(self, function: Callable[[], T], seconds: list[float]) -> T:
        start = self._accounts.worked()
        try:
            return function()
        finally:
            seconds.append(self._accounts.worked() - start)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
