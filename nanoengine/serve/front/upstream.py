"""A request to the server of one model, over its Unix socket, and the answer as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import httptools

from nanoengine.errors import NanoEngineError

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade"))
"""Headers of one connection (RFC 9110, 7.6.1); they are not passed on."""


class NoAnswer(NanoEngineError):
    """The server of a model does not answer, or its answer is cut off."""


class ModelAnswer(asyncio.Protocol):
    """An answer that is being received.

    Attributes:
        status, headers: of HTTP, once the head is there; names are in lower case, without those of HOP_BY_HOP.
        write_now: passes a piece of the body on at once, if it can; others wait for `pieces`.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._is_whole = self._is_lost = False
        self._news = asyncio.Event()
        self.status, self.headers = 0, Headers()
        self.write_now: Callable[[bytes], bool] = lambda _: False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        if self._pieces and self.write_now(b"".join(self._pieces)):
            self._pieces.clear()
        if self._pieces:
            self.transport.pause_reading()  # until they were passed on
        if self._pieces or self._is_whole:
            self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._news.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        if (lower := name.lower()) not in HOP_BY_HOP:
            self.headers.append((lower, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._news.set()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._is_whole = True

    async def receive(self) -> None:
        """Wait for more of it. Raises NoAnswer if it is cut off."""
        await self._news.wait()
        self._news.clear()
        if self._is_lost and not (self._pieces or self._is_whole):
            raise NoAnswer("its process ended before the answer was whole")

    async def pieces(self) -> AsyncIterator[bytes]:
        """What of the body was not written at once, as it comes. Raises NoAnswer if it is cut off."""
        while self._pieces or not self._is_whole:
            if self._pieces:
                piece = b"".join(self._pieces)
                self._pieces.clear()
                yield piece
                self.transport.resume_reading()
            else:
                await self.receive()

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])


@asynccontextmanager
async def request(
    socket: str, method: str, target: str, headers: Iterable[tuple[bytes, bytes]] = (), body: bytes = b""
) -> AsyncIterator[ModelAnswer]:
    """Send a request on a new connection, and receive the answer's head; the connection is closed at the end.

    Args:
        socket: path of the Unix socket.
        method, target: of HTTP; `target` is ASCII.
        headers: of the request, without those of the connection and of the length.
        body: of the request.

    Raises:
        NoAnswer: nobody listens there, or the answer is cut off.
    """
    try:
        transport, answer = await asyncio.get_running_loop().create_unix_connection(ModelAnswer, socket)
    except OSError as error:
        raise NoAnswer(f"its process does not answer: {error}") from error
    try:
        head = f"{method} {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n".encode()
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        transport.write(b"%b%bcontent-length: %d\r\n\r\n%b" % (head, lines, len(body), body))
        while not answer.status:
            await answer.receive()
        yield answer
    finally:
        transport.abort()  # if it is not whole, the server of the model ends the request
