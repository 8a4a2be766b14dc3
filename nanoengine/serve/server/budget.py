"""Budget: bytes that requests may hold, of each client and in total, so that no client takes the memory of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from nanoengine.serve.server.config import PART_OF_A_CLIENT
from nanoengine.serve.server.errors import Problem
from nanoengine.sizes import told

RETRY_AFTER = {"retry-after": "1"}


class Holding:
    """What one request holds of a budget; it may grow."""

    def __init__(self, budget: Budget, client: str):
        self._budget, self._client = budget, client
        self.size = 0

    def add(self, size: int) -> None:
        """Hold so many bytes more. Raises as `Budget.hold`."""
        budget = self._budget
        budget.check(self._client, self.size + size, size)
        self.size += size
        budget.of_clients[self._client] += size
        budget.total += size


class Budget:
    """Counted on the event loop.

    Args:
        what: the bytes are of.
        most: bytes in total.
        knob: the option that says so.
        hint: what a client can do about a request that never fits.
    """

    def __init__(self, what: str, most: int, knob: str, hint: str):
        self.what, self.most, self.knob, self.hint = what, most, knob, hint
        self.most_of_client = most // PART_OF_A_CLIENT
        self.total = 0
        self.of_clients: Counter[str] = Counter()

    @contextmanager
    def hold(self, client: str, size: int = 0) -> Iterator[Holding]:
        """Hold bytes for a client, and more with `Holding.add`; all are given back at the end.

        Raises:
            Problem: 400 if they can never fit, 429 if not beside what this client holds, 503 if not beside what all others hold.
        """
        own = Holding(self, client)
        own.add(size)
        try:
            yield own
        finally:
            self.total -= own.size
            self.of_clients[client] -= own.size
            if not self.of_clients[client]:
                del self.of_clients[client]

    def check(self, client: str, whole: int, size: int) -> None:
        """See that there is room for `size` bytes more of a request that has `whole` with them."""
        if whole > self.most_of_client:
            raise Problem(400, f"{self._needs(whole)}: {self.hint}")
        held = self.of_clients[client]
        if held + size > self.most_of_client:
            message = f"{self._needs(whole)}, and yours hold {told(held)} now"
            raise Problem(429, f"{message}: try again later", headers=RETRY_AFTER)
        if self.total + size > self.most:
            held_by_all = f"all requests hold {told(self.total)} of {told(self.most)} ({self.knob}) now"
            message = f"{self.what} may take {told(whole)}, and {held_by_all}"
            raise Problem(503, f"{message}: try again later", headers=RETRY_AFTER)

    def _needs(self, size: int) -> str:
        limit = f"{told(self.most_of_client)} (a quarter of {self.knob})"
        return f"{self.what} may take {told(size)}, and the requests of a client may hold {limit}"
