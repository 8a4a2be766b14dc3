"""BoundedHTTP: uvicorn's HTTP, with limits for the length of the head of a request, and for the time in which it arrives."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nanoengine.serve.server.scope import CONNECTION

MAX_HEAD_BYTES = 64 << 10
"""The longest request line with all headers: the parser itself has no limit (as in CVE-2025-48956)."""

MAX_HEAD_SECONDS = 60
"""Seconds in which a whole head must arrive; then the answer is 408, and the connection is closed."""


class BoundedHTTP(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._head_bytes = 0  # of a head that is not whole yet
        self._parsed_bytes = 0  # of the target and the headers of this request
        self._is_in_head = True
        self._is_in_body = False
        self._has_ended = False  # a message ended in the bytes that came last
        self._clock: asyncio.TimerHandle | None = None
        self._has_chunks = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._has_ended = False
        super().data_received(data)
        is_idle = self.cycle is None or self.cycle.response_complete
        if self._clock is None and is_idle and not self._is_in_body:
            self._watch_head()  # uvicorn's clock of idle connections stops at any byte, such as a blank line
        if self._is_in_head and not self._has_ended:  # otherwise some of it was the body before
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[CONNECTION] = self
        self._head_bytes = self._parsed_bytes = 0
        self._is_in_head = True
        if self._clock is None:
            self._watch_head()

    def on_url(self, url: bytes) -> None:
        self._parsed(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parsed(len(name) + len(value) + 4)
        if name.lower() == b"transfer-encoding" and value.strip().lower() != b"chunked":
            self.refuse(b"501 Not Implemented")
            raise ValueError("a transfer encoding that is not known")
        super().on_header(name, value)

    def _parsed(self, size: int) -> None:
        """Count a part of a head, which may be whole in what was received at once. Raises to stop the parser."""
        self._parsed_bytes += size
        if self._parsed_bytes > MAX_HEAD_BYTES:
            self.refuse(b"431 Request Header Fields Too Large")
            raise ValueError("a head that is too long")

    def on_headers_complete(self) -> None:
        self._is_in_head, self._is_in_body = False, True
        self._stop_clock()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._has_ended, self._is_in_body = True, False
        super().on_message_complete()

    def write_now(self, body: bytes) -> bool:
        """Write a piece of a stream at once; False: earlier bytes are still in the buffer, and nothing was written."""
        if self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body) if self._has_chunks else body)
        return True

    def without_chunks(self, send: Send) -> Send:
        """Send a body that ends with the connection: HTTP/1.0 has no chunks."""
        cycle = cast(Any, self.cycle)
        self._has_chunks = cycle.chunked_encoding = False

        async def send_plain(message: Message) -> None:
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        return send_plain

    def _watch_head(self) -> None:
        self._clock = self.loop.call_later(MAX_HEAD_SECONDS, self.refuse, b"408 Request Timeout")

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def refuse(self, status: bytes) -> None:
        """Answer with a status alone, and close the connection."""
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()
