"""FairCache: a cache with a partition for each client. No client hits, or learns of, the entries of another one."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MAX_CLIENTS = 1024
"""Most clients: the least recently active one is dropped before there are more."""


class FairCache(Generic[K, V]):
    """Values by client and key. Where the cache is full, the client with the largest partition loses its least recently used
    value.

    Any thread may use it.

    Args:
        most: limit of the sum of sizes.

    Attributes:
        size: sum of sizes.
    """

    def __init__(self, most: int):
        self.most = most
        self._clients: OrderedDict[str, OrderedDict[K, tuple[V, int]]] = OrderedDict()  # least recently active first
        self._sizes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.size = 0

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def get(self, client: str, key: K) -> V | None:
        with self._lock:
            partition = self._clients.get(client)
            if partition is None or key not in partition:
                return None
            partition.move_to_end(key)
            self._clients.move_to_end(client)
            return partition[key][0]

    def put(self, client: str, key: K, value: V, size: int) -> None:
        """Store a value instead of the last one of the key; one that is larger than the cache is dropped."""
        with self._lock:
            self._pop(client, key)
            partition = self._clients.setdefault(client, OrderedDict())
            self._clients.move_to_end(client)
            partition[key] = value, size
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
        partition = self._clients.get(client)
        if partition is None or key not in partition:
            return
        size = partition.pop(key)[1]
        self._sizes[client] -= size
        self.size -= size
        if not partition:
            del self._clients[client], self._sizes[client]
