"""A request to the server of one model, over its Unix socket, and the answer as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import httptools

from nanoengine.errors import NanoEngineError

Headers = list[tuple[bytes, bytes]]

READ_BYTES = 1 << 16

HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade"))
"""Headers of one connection (RFC 9110, 7.6.1); they are not passed on."""


class NoAnswer(NanoEngineError):
    """The server of a model does not answer, or its answer is cut off."""


class Answer:
    """An answer that is being received.

    Attributes:
        status, headers: of HTTP, once the head is there; names are in lower case, without those of HOP_BY_HOP.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._is_whole = False
        self.status, self.headers = 0, Headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        if (lower := name.lower()) not in HOP_BY_HOP:
            self.headers.append((lower, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._is_whole = True

    async def receive(self) -> None:
        """Wait for more of it. Raises NoAnswer if it is cut off."""
        try:
            data = await self._reader.read(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            raise NoAnswer("its process ended before the answer was whole")
        self._parser.feed_data(data)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, as it comes. Raises NoAnswer if it is cut off."""
        while self._pieces or not self._is_whole:
            if self._pieces:
                piece = b"".join(self._pieces)
                self._pieces.clear()
                yield piece
            else:
                await self.receive()

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    def hang_up(self) -> None:
        """Close the connection: the server of the model then ends the request."""
        self._writer.transport.abort()


@asynccontextmanager
async def request(
    socket: str, method: str, target: str, headers: Iterable[tuple[bytes, bytes]] = (), body: bytes = b""
) -> AsyncIterator[Answer]:
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
        reader, writer = await asyncio.open_unix_connection(socket)
    except OSError as error:
        raise NoAnswer(f"its process does not answer: {error}") from error
    answer = Answer(reader, writer)
    try:
        head = f"{method} {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n".encode()
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        writer.write(b"%b%bcontent-length: %d\r\n\r\n%b" % (head, lines, len(body), body))
        while not answer.status:
            await answer.receive()
        yield answer
    finally:
        answer.hang_up()
