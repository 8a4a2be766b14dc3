"""ResponseStore: keeps responses of /v1/responses, within limits of bytes and numbers."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.features.fair_cache import FairCache

MAX_RESPONSES = 256
"""The most responses of one client."""

MAX_CLIENT_BYTES = 16 << 20
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A response as JSON, and its conversation with the response at the end: lists of items as JSON."""

    body: bytes
    items: tuple[bytes, ...]

    @property
    def size(self) -> int:
        return len(self.body) + sum(map(len, self.items))


class ResponseStore(FairCache[str, Stored]):
    """Responses by client and id; a client finds its own alone."""

    def __init__(self) -> None:
        super().__init__(MAX_BYTES, MAX_CLIENT_BYTES, MAX_RESPONSES)
