"""WorkShare: the server's CPU time, scheduled fairly among clients, as the engine does with its steps.

Reading, rendering, encoding and writing for one client delays all others: there is one interpreter. So each client has an
account of the seconds that threads have worked on its requests. Beside N - 1 other clients, one that has used a second leaves
N - 1 seconds to them, but no more than MOST_OTHERS, before its next request is read, or the next piece of a long one is begun.
The steps of the engine count as well, up to a bound: these are shared by the engine, but many short requests would have half of
its time and half of the interpreter's.
"""

from __future__ import annotations

import asyncio
import time
import types
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

R = TypeVar("R")

RECENT_SECONDS = 0.1
"""A client counts as active until RECENT_SECONDS after its last request."""

SECONDS_OF_A_REQUEST = 0.5e-3
SECONDS_OF_A_BYTE = 2e-9
"""The least that a request takes, which is charged before it is read: several of one client are not read at once."""

MOST_OWED = 2.0
"""Most seconds that a client owes, or has paid before: the writing of streams never waits, and would add to it for ever."""

SECONDS_OF_A_REFUSAL = 0.1
"""Seconds that a refused client owes: reading its next request at once would be wasted work."""

MOST_OF_STEPS = 0.05
"""Most seconds of steps that count between two requests of a client: others have had their part of a long answer's steps."""

MOST_OTHERS = 3
"""Most clients do not keep the server busy: with hundreds, one may still use a quarter of its time."""


@dataclass(slots=True)
class ClientUsage:
    """The usage of a client since its last request began.

    Attributes:
        steps: seconds of steps that were charged before.
        paid_at: when others have had the time for all that was charged before.
        work: seconds of the server's threads since then.
    """

    steps: float
    paid_at: float
    work: float = 0.0


class WorkShare:
    """Accounts of clients, for one event loop.

    Args:
        clock: in seconds.
        worked: CPU seconds of the calling thread.
        sleep: waits for a number of seconds.
        spent: seconds of the engine's steps of each client so far.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        spent: Mapping[str, float] | None = None,
    ):
        self.clock, self.worked, self.sleep, self.spent = clock, worked, sleep, {} if spent is None else spent
        self._counted: dict[str, ClientUsage] = {}
        self._num_requests = Counter[str]()
        self._left: dict[str, float] = {}  # when a client that has none ended its last request, in this order
        self._ready: dict[str, float] = {}  # when the others have had the time that a client owes them
        self._prepaid: dict[str, float] = {}  # seconds that a client was charged before it had them
        self._lines: dict[str, asyncio.Lock] = {}

    def num_others(self, client: str) -> int:
        """Active clients, beside one."""
        now, left = self.clock(), self._left
        if left and now - next(iter(left.values())) > RECENT_SECONDS:
            for gone in [name for name, at in left.items() if now - at > RECENT_SECONDS]:
                del left[gone]
                self._counted.pop(gone, None)
            self._ready = {name: at for name, at in self._ready.items() if at > now}
        return len(self._num_requests) + len(left) - (client in self._num_requests or client in left)

    def charge(self, client: str, seconds: float) -> None:
        """Add the seconds of some work for a client to its account."""
        if client in self._counted:
            self._counted[client].work += seconds
        prepaid = min(seconds, self._prepaid.get(client, 0.0))
        if prepaid:
            self._prepaid[client] -= prepaid
        self._owe(client, seconds - prepaid, prepaid)  # others had nothing of the time that it worked

    def _owe(self, client: str, seconds: float, more: float = 0.0) -> None:
        """Add to the seconds that a client owes; nothing while no other client is active."""
        others, now = self.num_others(client), self.clock()
        if others:
            ready = max(self._ready.get(client, now), now) + seconds * min(others, MOST_OTHERS) + more
            self._ready[client] = min(ready, now + MOST_OWED)

    def _charge_steps(self, client: str) -> None:
        """Charge the usage of a client since its last request began, steps included: others had the time between."""
        now, spent = self.clock(), self.spent.get(client, 0.0)
        last = self._counted.get(client, ClientUsage(spent, now))
        seconds = min(max(spent - last.steps, 0.0), MOST_OF_STEPS) + last.work
        ready = min(last.paid_at + seconds * (1 + min(self.num_others(client), MOST_OTHERS)), now + MOST_OWED)
        self._ready[client] = ready = max(self._ready.get(client, now), ready, now)
        self._counted[client] = ClientUsage(spent, ready)

    def refused(self, client: str) -> None:
        """Charge a client whose request was refused for lack of room."""
        self._owe(client, 0.0, SECONDS_OF_A_REFUSAL)

    async def paid(self, client: str) -> None:
        """Wait until a client owes nothing."""
        while (wait := self._ready.get(client, 0.0) - self.clock()) > 0 and self.num_others(client):
            await self.sleep(min(wait, RECENT_SECONDS))

    @asynccontextmanager
    async def turn(self, client: str, num_bytes: int) -> AsyncIterator[None]:
        """The context of a request of a client; it begins when the client owes nothing."""
        self._num_requests[client] += 1
        self._left.pop(client, None)
        try:
            if self.num_others(client):
                async with self._lines.setdefault(client, asyncio.Lock()):
                    self._charge_steps(client)
                    await self.paid(client)
                    least = SECONDS_OF_A_REQUEST + SECONDS_OF_A_BYTE * num_bytes
                    self._owe(client, least)
                    self._prepaid[client] = min(self._prepaid.get(client, 0.0) + least, MOST_OWED)
            yield
        finally:
            self._num_requests[client] -= 1
            if not self._num_requests[client]:
                del self._num_requests[client]
                self._lines.pop(client, None)
                self._prepaid.pop(client, None)
                self._left[client] = self.clock()

    def charged(self, client: str, function: Callable[[Any], R], value: Any) -> R:
        """The result of a function, whose time on the event loop is charged."""
        start = self.worked()
        try:
            return function(value)
        finally:
            self.charge(client, self.worked() - start)

    @types.coroutine
    def measured(self, client: str, work: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
        """Await a coroutine, and charge its time on the event loop between two of its pauses."""
        error: BaseException | None = None
        while True:
            go_on: Callable[[Any], Any] = work.send if error is None else work.throw
            try:
                awaited = self.charged(client, go_on, error)
            except StopIteration:
                return
            try:
                yield awaited
                error = None
            except BaseException as thrown:  # the task is cancelled, or what it awaits has failed
                error = thrown
