"""Quota: how much of a resource each client uses, and all in total, against limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nanoengine.serve.server.config import PART_OF_A_CLIENT
from nanoengine.serve.server.errors import RETRY_AFTER, APIError
from nanoengine.sizes import format_bytes

PART_OF_A_NEWCOMER = 8
"""A client may have 1 / PART_OF_A_NEWCOMER of a full resource: no client shuts out another."""


@dataclass(eq=False)
class Quota:
    """A limit of a resource, in total and of each client. Used on the event loop.

    Args:
        most: in total.
        of_client: of one client; None: as much as there is.
        of_newcomer: a client that has no more than this has room although `most` is reached, but not twice `most`.
        option: that sets `most`; this and the next three are for messages to clients.
        needs: a request and its size, such as "this answer may take {}".
        hint: what a client can do about a request that can never be served.
        format: makes text of a size.
    """

    most: int
    of_client: int | None = None
    of_newcomer: int = 0
    option: str = ""
    needs: str = ""
    hint: str = ""
    format: Callable[[int], str] = str
    total: int = field(default=0, init=False)
    of_clients: Counter[str] = field(default_factory=Counter, init=False)

    @classmethod
    def of_bytes(cls, most: int, option: str, needs: str, hint: str) -> Quota:
        """A quota of memory: a client may have 1 / PART_OF_A_CLIENT of it."""
        return cls(most, most // PART_OF_A_CLIENT, 0, option, needs, hint, format_bytes)

    @classmethod
    def of_positions(cls, most: int, option: str = "", needs: str = "", unit: str = "") -> Quota:
        """A quota of queue positions or connections: a client may have all of them, but for the part of a newcomer."""
        return cls(most, None, most // PART_OF_A_NEWCOMER, option, needs, "ask for fewer", f"{{}} {unit}".format)

    def has_room(self, client: str, size: int = 1, total: int | None = None) -> bool:
        """Whether a client may have an amount more. `total`: of all clients, if it was not counted here."""
        used, total = self.of_clients[client] + size, (self.total if total is None else total) + size
        if self.of_client is not None and used > self.of_client:
            return False
        return total <= self.most or (used <= self.of_newcomer and total <= 2 * self.most)

    def take(self, client: str, size: int = 1) -> None:
        """Add to the count of a client, whether or not there is room."""
        self.of_clients[client] += size
        self.total += size

    def release(self, client: str, size: int = 1) -> None:
        self.take(client, -size)
        if not self.of_clients[client]:
            del self.of_clients[client]

    @contextmanager
    def hold(self, client: str, size: int = 0, total: int | None = None) -> Iterator[Holding]:
        """Hold an amount for a request of a client, and more with `Holding.add`; all is released at the end.

        Raises:
            APIError: 400 if it can never fit, 429 if a client may not have so much at a time, 503 if there is no room for it now.
        """
        holding = Holding(self, client)
        holding.add(size, total)
        try:
            yield holding
        finally:
            holding.release(holding.size)

    def check(self, client: str, size: int, whole: int, total: int | None = None) -> None:
        """Check that there is room for `size` more of a request that has `whole` with them. Raises as `hold`."""
        if self.has_room(client, size, total):
            return
        needs, used, say = self.needs.format(self.format(whole)), self.of_clients[client], self.format
        limit, part = (self.most, "") if self.of_client is None else (self.of_client, "a quarter of ")
        if whole > limit:
            raise APIError(400, f"{needs}, and a client may have {say(limit)} ({part}{self.option}): {self.hint}")
        all_ = say(self.total if total is None else total)
        held = f"{all_} of {say(self.most)} ({self.option}) are taken, {say(used)} by you"
        status = 429 if self.of_client is not None and used + size > self.of_client else 503
        raise APIError(status, f"{needs}; {held}: try again later", headers=RETRY_AFTER)


class Holding:
    """The part of a quota that one request holds."""

    def __init__(self, quota: Quota, client: str):
        self._quota, self._client = quota, client
        self.size = 0

    def add(self, size: int, total: int | None = None) -> None:
        """Hold an amount more. Raises as `Quota.hold`."""
        self._quota.check(self._client, size, self.size + size, total)
        self._quota.take(self._client, size)
        self.size += size

    def release(self, size: int) -> None:
        """Hold an amount less, or nothing."""
        size = min(size, self.size)
        self.size -= size
        self._quota.release(self._client, size)
