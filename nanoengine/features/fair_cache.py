"""FairCache: what was made for clients and may be asked for again. No client finds, or learns of, what another one left."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MAX_CLIENTS = 1024
"""The client that has used nothing for longest goes before there are more."""


class FairCache(Generic[K, V]):
    """Values by client and key. Where there is no room, the client that has most loses what it has not used for longest.

    Any thread may use it.

    Args:
        most: size of all values together.

    Attributes:
        size: of all values.
    """

    def __init__(self, most: int):
        self.most = most
        self._clients: OrderedDict[str, OrderedDict[K, tuple[V, int]]] = OrderedDict()  # the last has used it last
        self._sizes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.size = 0

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def get(self, client: str, key: K) -> V | None:
        with self._lock:
            own = self._clients.get(client)
            if own is None or key not in own:
                return None
            own.move_to_end(key)
            self._clients.move_to_end(client)
            return own[key][0]

    def put(self, client: str, key: K, value: V, size: int) -> None:
        """Keep a value in the place of the one that the key had; one that is too large is not kept."""
        with self._lock:
            self._pop(client, key)
            own = self._clients.setdefault(client, OrderedDict())
            self._clients.move_to_end(client)
            own[key] = value, size
            self._sizes[client] += size
            self.size += size
            while self.size > self.most:
                largest = max(self._sizes, key=self._sizes.__getitem__)
                self._pop(largest, next(iter(self._clients[largest])))
            if len(self._clients) > MAX_CLIENTS:
                first = next(iter(self._clients))
                self.size -= self._sizes.pop(first)
                del self._clients[first]

    def _pop(self, client: str, key: K) -> None:
        own = self._clients.get(client)
        if own is None or key not in own:
            return
        size = own.pop(key)[1]
        self._sizes[client] -= size
        self.size -= size
        if not own:
            del self._clients[client], self._sizes[client]
