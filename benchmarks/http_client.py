"""A client that costs next to nothing beside the server it measures: raw sockets on asyncio, events timed and not parsed.

It speaks as much of HTTP/1.1 as servers with OpenAI's interface do: answers with a length, in chunks, or until the connection
ends. Nothing is thrown at the caller: what became of a request is all in its `Answer`.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

BUFFER_BYTES = 1 << 16

# Quotes inside of a JSON string are escaped: these match fields only, never what is said in a text.
HAS_TEXT = re.compile(rb'"(?:text|content)": ?"[^"]').search
FINISH_REASON = re.compile(rb'"finish_reason": ?"(\w+)"').search
IS_ERROR = re.compile(rb'(?:data: ?\{"error"|error:)').match


def has_text(event: bytes) -> bool:
    """Whether an event brings text; a choice's last often has none. Of completions it is seen without a pattern."""
    if b'"text":"' in event:
        return b'"text":""' not in event
    return HAS_TEXT(event) is not None


@dataclass(slots=True)
class Answer:
    """What came back. Times are `perf_counter`'s; those of events are of their receipt."""

    status: int = 0  # 0: the connection ended before any
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    sent: float = 0.0  # when the request was written
    ended: float = 0.0
    event_times: list[float] = field(default_factory=list)  # of each server-sent event, but for [DONE]
    text_times: list[float] = field(default_factory=list)  # of those with text: as a rule one a token
    finish_reasons: list[str] = field(default_factory=list)  # in the order they came in a stream, one for each choice
    is_done: bool = False  # the stream said [DONE]
    body: bytes = b""  # of a whole answer; of a stream only if it is to be kept
    error: str | None = None  # what the server said went wrong, or what happened to the connection

    @property
    def finish_reason(self) -> str | None:
        return self.finish_reasons[-1] if self.finish_reasons else None

    @property
    def is_ok(self) -> bool:
        """Whether it came whole, and is no error."""
        return self.status == 200 and self.error is None


class AnswerParser:
    """Makes one answer of the bytes of a connection, however they are cut.

    Args:
        keep: whether the bytes of a stream are kept.
    """

    def __init__(self, *, keep: bool = False):
        self.answer = Answer()
        self.keeps_alive = True  # the connection may serve another request afterwards
        self._keep = keep
        self._rest = b""  # of the head, or of a chunk that is not all there
        self._tail = b""  # the beginning of an event
        self._parts: list[bytes] = []  # of the body
        self._num_missing: int | None = None  # bytes of a body with a length; None: in chunks, or until the end
        self._is_chunked = False
        self._is_stream = False

    def feed(self, data: bytes, now: float) -> bool:
        """Take what has come at a time; whether the answer is complete.

        Raises:
            ValueError: this is no HTTP.
        """
        if not self.answer.status:
            head, blank_line, data = (self._rest + data).partition(b"\r\n\r\n")
            if not blank_line:
                self._rest = head
                return False
            self._rest = b""
            self._read_head(head)
        if self._is_chunked:
            is_over = self._read_chunks(data, now)
        elif self._num_missing is not None:
            self._read_body(data, now)
            self._num_missing -= len(data)
            is_over = self._num_missing <= 0
        else:
            self._read_body(data, now)
            is_over = False
        if is_over:
            self._finish(now)
        return is_over

    def end_of_connection(self, now: float, reason: Exception | None = None) -> None:
        """The connection is gone: the end of an answer that says no length, and a fault of any other."""
        answer = self.answer
        is_over = answer.status and not self._is_chunked and self._num_missing is None and reason is None
        self._finish(now)
        if not is_over:
            answer.error = f"the connection ended {'within' if answer.status else 'before'} the answer"
            answer.error += f": {reason}" if reason else ""

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise ValueError(f"the answer begins with {first[:80]!r}: this is no HTTP/1")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.answer.status = int(rest[:3])
        self.answer.headers = headers
        self.keeps_alive = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
        self._is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        if self.answer.status in (204, 304):
            self._num_missing = 0
        elif not self._is_chunked and "content-length" in headers:
            self._num_missing = int(headers["content-length"])

    def _read_chunks(self, data: bytes, now: float) -> bool:
        data = self._rest + data if self._rest else data
        start = 0
        while (line_end := data.find(b"\r\n", start)) >= 0:
            size = int(data[start:line_end].partition(b";")[0], 16)
            if size == 0:  # trailers may follow, then an empty line
                if data.find(b"\r\n\r\n", line_end) < 0:
                    break
                return True
            end = line_end + 2 + size
            if len(data) < end + 2:
                break
            self._read_body(data[line_end + 2 : end], now)
            start = end + 2
        self._rest = data[start:]
        return False

    def _read_body(self, data: bytes, now: float) -> None:
        if self._keep or not self._is_stream:
            self._parts.append(data)
        if self._is_stream:
            if b"\r" in data:  # some end lines so; there is none within JSON
                data = data.replace(b"\r", b"")
            *events, self._tail = (self._tail + data).split(b"\n\n")
            for event in events:
                self._read_event(event, now)

    def _read_event(self, event: bytes, now: float) -> None:
        answer = self.answer
        if event == b"data: [DONE]":
            answer.is_done = True
        elif IS_ERROR(event):
            answer.error = event.decode(errors="replace")
        elif event.startswith(b"data:"):  # others are comments, which keep a connection open
            answer.event_times.append(now)
            if has_text(event):
                answer.text_times.append(now)
            if found := FINISH_REASON(event):
                answer.finish_reasons.append(found[1].decode())

    def _finish(self, now: float) -> None:
        answer = self.answer
        answer.body = b"".join(self._parts)
        answer.ended = now
        if not self._is_stream and (found := FINISH_REASON(answer.body)):
            answer.finish_reasons.append(found[1].decode())
        if answer.status >= 400:
            answer.error = answer.body[:1000].decode(errors="replace")


class Connection(asyncio.BufferedProtocol):
    """One connection, which serves one request at a time.

    Args:
        buffer: what comes is read into, and taken out of at once: several connections may share it. (asyncio's own for a plain
            Protocol is new for each read, and so long that the system maps its memory anew: that costs more than all the rest.)
    """

    def __init__(self, buffer: bytearray) -> None:
        self.transport: asyncio.Transport
        self.is_closed = False
        self._buffer = buffer
        self._parser: AnswerParser | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._on_data: Callable[[Connection], object] | None = None

    async def request(
        self, message: bytes, *, keep: bool = False, on_data: Callable[[Connection], object] | None = None
    ) -> Answer:
        """Send a message, and wait for the answer. Whoever is cancelled while waiting closes the connection."""
        self._parser = AnswerParser(keep=keep)
        self._on_data = on_data
        self._waiter = asyncio.get_running_loop().create_future()
        self._parser.answer.sent = perf_counter()
        self.transport.write(message)
        try:
            return await self._waiter
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        """At once, whatever is under way."""
        self.is_closed = True
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        now = perf_counter()
        data = bytes(memoryview(self._buffer)[:nbytes])
        if self._parser is None:  # nothing was asked for
            self.close()
            return
        try:
            is_over = self._parser.feed(data, now)
        except ValueError as error:
            self._end(now, error)
            return
        if is_over:
            self.is_closed = self.is_closed or not self._parser.keeps_alive
            self._hand_over()
        elif self._on_data is not None:
            self._on_data(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        if self._parser is not None:
            self._end(perf_counter(), exc)

    def _end(self, now: float, reason: Exception | None) -> None:
        assert self._parser is not None
        self._parser.end_of_connection(now, reason)
        self._hand_over()
        self.close()

    def _hand_over(self) -> None:
        parser, waiter, self._parser = self._parser, self._waiter, None
        if parser is not None and waiter is not None and not waiter.done():
            waiter.set_result(parser.answer)


class Client:
    """A server's client, on one event loop. Connections are kept, and there are as many as requests run at a time.

    Args:
        host, port: of the server.
        headers: for every request, such as an API key.
        receive_buffer: bytes that the system may hold of what was not read yet; None: as it likes.
    """

    def __init__(
        self, host: str, port: int, headers: Mapping[str, str] | None = None, receive_buffer: int | None = None
    ):
        self.host = host
        self.port = port
        self.receive_buffer = receive_buffer
        lines = {"host": f"{host}:{port}", "content-type": "application/json", **(headers or {})}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[Connection] = []
        self._buffer = bytearray(BUFFER_BYTES)

    async def complete(
        self,
        body: Mapping[str, Any] | bytes,
        path: str = "/v1/completions",
        *,
        keep: bool = False,
        on_data: Callable[[Connection], object] | None = None,
    ) -> Answer:
        """POST a request for a completion, streamed or not, and wait for all of the answer.

        Args:
            body: the request; bytes are sent as they are.
            keep: whether a stream's bytes are kept.
            on_data: told of all that comes, but the end; it may close the connection, or pause its transport.
        """
        data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
        return await self.request("POST", path, data, keep=keep, on_data=on_data)

    async def get(self, path: str) -> Answer:
        return await self.request("GET", path)

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        keep: bool = False,
        on_data: Callable[[Connection], object] | None = None,
    ) -> Answer:
        """Any request. One whose connection the server was just closing is sent again, over a new one."""
        head = f"{method} {path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n"
        message = head.encode() + body
        while True:
            kept = self._take_idle()
            try:
                connection = kept or await self._connect()
            except OSError as error:
                now = perf_counter()
                return Answer(sent=now, ended=now, error=f"no connection to {self.host}:{self.port}: {error}")
            answer = await connection.request(message, keep=keep, on_data=on_data)
            if not connection.is_closed:
                self._idle.append(connection)
            elif kept is not None and answer.status == 0:
                continue
            return answer

    def close(self) -> None:
        """Close the connections that no request uses."""
        while self._idle:
            self._idle.pop().close()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        if self.receive_buffer is None:
            _, connection = await loop.create_connection(lambda: Connection(self._buffer), self.host, self.port)
            return connection
        own = socket.socket()
        own.setblocking(False)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_buffer)  # counts only before connecting
        await loop.sock_connect(own, (self.host, self.port))
        _, connection = await loop.create_connection(lambda: Connection(self._buffer), sock=own)
        return connection
