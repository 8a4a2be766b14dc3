"""A call of the application itself, without a socket: a test sees what it does, and says which address it comes from."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp

from tests.serve.aio.toys import PATIENCE


async def post(
    app: ASGIApp, path: str, body: bytes, address: str = "127.0.0.1", key: str | None = None
) -> tuple[int, bytes]:
    """The status of an answer, and its body."""
    status, parts = 0, []
    received = iter([{"type": "http.request", "body": body, "more_body": False}])
    gone = asyncio.Event()

    async def receive() -> Any:
        if (message := next(received, None)) is not None:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": headers, "http_version": "1.1", "client": (address, 1)}
    async with asyncio.timeout(PATIENCE):
        await app(scope, receive, send)
    return int(status), b"".join(parts)
