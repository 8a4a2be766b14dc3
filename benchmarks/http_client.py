"""A small HTTP client for tests of a server: one connection for each request, which may be read slowly, or left."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

IS_ERROR = re.compile(rb'^(?:data: ?\{"error"|error:).*', re.MULTILINE)
SMALL_BUFFER = 4096
"""Bytes that the system holds for a slow reader; the server waits with the others."""


@dataclass(slots=True)
class Answer:
    """What came back."""

    status: int = 0  # 0: the connection ended before any
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""
    error: str | None = None  # what the server said went wrong, or what happened to the connection

    @property
    def is_ok(self) -> bool:
        """Whether it came whole, and is no error."""
        return self.status == 200 and self.error is None

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def is_done(self) -> bool:
        """Whether a stream came to its end."""
        return self.body.rstrip().endswith(b"data: [DONE]")

    @classmethod
    def of_bytes(cls, received: bytes) -> Answer:
        """All that came on a connection until its end."""
        head, blank_line, body = received.partition(b"\r\n\r\n")
        if not blank_line:
            return cls(error="the connection ended before the answer")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        answer = cls(int(first.split()[1]), headers)
        if headers.get("transfer-encoding", "") == "chunked":
            is_whole = body.endswith(b"0\r\n\r\n")
            while size := int(body.partition(b"\r\n")[0] or b"0", 16):
                start = body.index(b"\r\n") + 2
                answer.body += body[start : start + size]
                body = body[start + size + 2 :]
        else:
            answer.body = body
            is_whole = len(body) == int(headers.get("content-length", len(body)))
        if not is_whole:
            answer.error = "the connection ended within the answer"
        elif answer.status >= 400:
            answer.error = answer.body[:1000].decode(errors="replace")
        elif answer.is_stream and (found := IS_ERROR.search(answer.body)):
            answer.error = found[0].decode(errors="replace")
        return answer


async def ask(
    port: int,
    path: str,
    body: Mapping[str, Any] | bytes | None = None,
    *,
    pause: float = 0.0,
    most_reads: int | None = None,
) -> Answer:
    """Send a request to this machine, a POST if it has a body, and wait for the answer.

    Args:
        body: bytes are sent as they are.
        pause: seconds between two reads, of a buffer that is small then.
        most_reads: after so many the connection is closed, whatever is missing.
    """
    data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
    own = socket.socket()
    own.setblocking(False)
    if pause:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)  # counts only before connecting
    try:
        await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", port))
    except OSError as error:
        own.close()
        return Answer(error=f"no connection: {error}")
    reader, writer = await asyncio.open_connection(sock=own, limit=SMALL_BUFFER if pause else 1 << 16)
    received, num_reads = bytearray(), 0
    try:
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n"
        writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        while num_reads != most_reads and (piece := await reader.read(1 << 16)):
            received += piece
            num_reads += 1
            if pause:
                await asyncio.sleep(pause)
    except OSError as error:
        return Answer(error=f"the connection ended: {error}")
    finally:
        writer.transport.abort()
    return Answer.of_bytes(bytes(received))
