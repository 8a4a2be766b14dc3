"""JSON responses; a long one is sent in pieces, each when the client has read the one before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PIECE_BYTES = 1 << 18

encode = msgspec.json.encode


def json_response(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


class ChunkedJSONResponse(Response):
    """A response of JSON in pieces, which are never joined.

    Args:
        pieces: of the body.
    """

    media_type = "application/json"

    def __init__(self, pieces: Iterable[bytes]):
        self._pieces = list(pieces)
        super().__init__(headers={"content-length": str(sum(map(len, self._pieces)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in in_pieces(self._pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def in_pieces(pieces: Iterable[bytes]) -> Iterable[bytes]:
    """The bytes of all pieces, in pieces of about PIECE_BYTES."""
    parts: list[bytes] = []
    size = 0
    for piece in pieces:
        for start in range(0, len(piece), PIECE_BYTES):
            part = piece[start : start + PIECE_BYTES]
            parts.append(part)
            size += len(part)
            if size >= PIECE_BYTES:
                yield b"".join(parts)
                parts, size = [], 0
    if parts:
        yield b"".join(parts)
