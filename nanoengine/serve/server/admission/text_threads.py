"""TextThreads: threads that render chats, encode and decode, so that a long prompt delays no other client."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from nanoengine.serve.server.admission.fair_thread_pool import FairThreadPool
from nanoengine.serve.server.admission.work_share import WorkShare

T = TypeVar("T")

CURRENT_CLIENT = ContextVar("CURRENT_CLIENT", default="")
"""The client whose request a task of the event loop answers."""

IS_LONG = ContextVar("IS_LONG", default=False)
"""Whether the body of that request is long."""


class TextThreads:
    """Two thread pools, for short and for long bodies, so that a short one never waits for a long one. One client never has all
    threads of a pool, if there are several.

    Args:
        num_threads: of each pool.
        accounts: charged with the seconds that the threads work.
    """

    def __init__(self, num_threads: int, accounts: WorkShare | None = None):
        self._accounts, of_client = accounts or WorkShare(), max(1, num_threads - 1)
        self._pools = {is_long: FairThreadPool(num_threads, of_client, self._accounts) for is_long in (False, True)}

    async def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The result of a function, called in one of the threads."""
        return await self._pools[IS_LONG.get()].run(CURRENT_CLIENT.get(), partial(function, *args, **kwargs))

    async def finish(self, steps: Generator[None, None, T]) -> T:
        """The value that a generator returns. Other clients may run between two of its steps."""
        while (returned := await self.run(_step, steps)) is None:
            await self._accounts.paid(CURRENT_CLIENT.get())
        return returned[0]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def run_to_end(steps: Generator[None, None, T]) -> T:
    """The value that a generator returns; all its steps run at once."""
    while (returned := _step(steps)) is None:
        pass
    return returned[0]


def _step(steps: Generator[None, None, T]) -> tuple[T] | None:
    try:
        next(steps)
    except StopIteration as end:
        return (end.value,)
    return None
