"""ResponseStore: answers of /v1/responses that clients may come back to, as many as there is room for."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.fair_cache import FairCache

MAX_RESPONSES = 256
"""Of one client."""

MAX_CLIENT_BYTES = 16 << 20
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """An answer, and the conversation up to it: lists of items as JSON, one behind the other."""

    body: bytes
    items: tuple[bytes, ...]

    @property
    def size(self) -> int:
        return len(self.body) + sum(map(len, self.items))


class ResponseStore(FairCache[str, Stored]):
    """What was answered, by client and id. Nobody sees another's."""

    def __init__(self) -> None:
        super().__init__(MAX_BYTES, MAX_CLIENT_BYTES, MAX_RESPONSES)
