"""TextThreads: threads that render chats, encode and decode, so that a long prompt delays no other client."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from nanoengine.serve.server.admission.fair_thread_pool import Turns
from nanoengine.serve.server.admission.work_share import WorkShare

T = TypeVar("T")

CURRENT_CLIENT = ContextVar("CURRENT_CLIENT", default="")
"""The client whose request a task of the event loop answers."""

IS_LONG = ContextVar("IS_LONG", default=False)
"""Whether the body of that request is long."""


class TextThreads:
    """A bounded pool: what is asked for beyond it waits, and the event loop goes on. One client never has all threads, if there
    are several, and what is short never waits for what is long.

    Args:
        num_threads: as many texts as are worked on at once, long ones and short ones.
        share: is charged with what the threads work.
    """

    def __init__(self, num_threads: int, share: WorkShare | None = None):
        self._share, of_client = share or WorkShare(), max(1, num_threads - 1)
        self._turns = {is_long: Turns(num_threads, of_client, share=self._share) for is_long in (False, True)}

    async def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The result of a function, called in one of the threads."""
        return await self._turns[IS_LONG.get()].run(CURRENT_CLIENT.get(), partial(function, *args, **kwargs))

    async def finish(self, steps: Generator[None, None, T]) -> T:
        """What a generator returns. Between two of its steps it is the turn of other clients."""
        while (found := await self.run(_step, steps)) is None:
            await self._share.paid(CURRENT_CLIENT.get())
        return found[0]

    def close(self) -> None:
        for turns in self._turns.values():
            turns.close()


def at_once(steps: Generator[None, None, T]) -> T:
    """What a generator returns, without a pause."""
    while (found := _step(steps)) is None:
        pass
    return found[0]


def _step(steps: Generator[None, None, T]) -> tuple[T] | None:
    try:
        next(steps)
    except StopIteration as end:
        return (end.value,)
    return None
