"""ResponseStore: answers of /v1/responses that clients may come back to, as many as there is room for."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_RESPONSES = 256
"""Of one client."""

MAX_CLIENT_BYTES = 16 << 20
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """An answer, and the conversation up to it, as JSON."""

    body: bytes
    items: bytes

    @property
    def size(self) -> int:
        return len(self.body) + len(self.items)


class ResponseStore:
    """What was answered. Where there is no room, what a client has not asked for longest goes first; nobody sees another's.

    Args:
        max_responses, max_client_bytes: of one client.
        max_bytes: of all together; it is the client with most of them that loses one.
    """

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_client_bytes: int = MAX_CLIENT_BYTES,
        max_bytes: int = MAX_BYTES,
    ):
        self._limits = (max_responses, max_client_bytes, max_bytes)
        self._clients: dict[str, OrderedDict[str, Stored]] = {}
        self._sizes: dict[str, int] = {}  # bytes, by client

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def put(self, client: str, response_id: str, stored: Stored) -> None:
        self.delete(client, response_id)
        own = self._clients.setdefault(client, OrderedDict())
        own[response_id] = stored
        self._sizes[client] = self._sizes.get(client, 0) + stored.size
        count, client_bytes, all_bytes = self._limits
        while own and (len(own) > count or self._sizes.get(client, 0) > client_bytes):
            self.delete(client, next(iter(own)))
        while self.num_bytes > all_bytes:
            most = max(self._sizes, key=self._sizes.__getitem__)
            self.delete(most, next(iter(self._clients[most])))

    def get(self, client: str, response_id: str) -> Stored | None:
        own = self._clients.get(client)
        if own is None or response_id not in own:
            return None
        own.move_to_end(response_id)
        return own[response_id]

    def delete(self, client: str, response_id: str) -> bool:
        """Whether there was one."""
        own = self._clients.get(client)
        stored = None if own is None else own.pop(response_id, None)
        if stored is None:
            return False
        self._sizes[client] -= stored.size
        if not own:
            del self._clients[client], self._sizes[client]
        return True
