"""Link: messages to and from another process on a socket that never blocks, for a process with several of them.

The framing is the one of `multiprocessing.connection.Connection`, which is at the other end.
"""

from __future__ import annotations

import pickle
import selectors
import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any

HEADER = struct.Struct("!i")
LONG_HEADER = struct.Struct("!iQ")
"""Header of messages of 2 GiB and more: -1, and the size. They are sent, and never received."""
READ_BYTES = 1 << 18


class Unreadable(Exception):
    """The other side has sent bytes that are no message; the bytes behind them cannot be read, either."""


def framed(message: Any) -> bytes:
    """A message as bytes, with its size before it."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    size = len(body)
    return (HEADER.pack(size) if size < 1 << 31 else LONG_HEADER.pack(-1, size)) + body


class Link:
    """Messages are pickled, so the other side must be trusted: it is a process that this one has started.

    Args:
        connected: a socket, which the link closes.
        selector: watches the socket for bytes to receive, and for room to send.
        data: of the key in the selector.
    """

    def __init__(self, connected: socket.socket, selector: selectors.BaseSelector, data: Any):
        connected.setblocking(False)
        self.socket, self._selector, self._data = connected, selector, data
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self._is_full = False  # the socket takes no more bytes now
        self.is_closed = False
        selector.register(connected, selectors.EVENT_READ, data)

    def send(self, message: Any) -> None:
        """Send a message, now or as soon as the socket has room. Nothing happens if the link is closed."""
        self.send_framed(framed(message))

    def send_framed(self, message: bytes) -> None:
        """Send the result of `framed`, which may go to several links."""
        if self.is_closed:
            return
        self._unsent.append(memoryview(message))
        if not self._is_full:
            self.flush()

    def flush(self) -> None:
        """Send as many bytes as the socket takes now."""
        try:
            while self._unsent:
                sent = self.socket.send(self._unsent[0])
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            pass  # the rest is sent when there is room
        except OSError:  # the other side is gone, and `receive` raises
            self._unsent.clear()
        if bool(self._unsent) is not self._is_full:
            self._is_full = not self._is_full
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._is_full else 0)
            self._selector.modify(self.socket, events, self._data)

    def receive(self) -> Iterator[Any]:
        """Complete messages that have arrived, until the link is closed. It never waits.

        Raises:
            EOFError: the other side has closed the socket.
            Unreadable: the bytes are no message.
        """
        try:
            chunk = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise EOFError(str(error)) from error
        if not chunk:
            raise EOFError("closed by the other side")
        received = self._received
        received += chunk
        while not self.is_closed and len(received) >= HEADER.size:
            (size,) = HEADER.unpack_from(received)
            if size < 0:
                raise Unreadable(f"has announced a message of {size} bytes")
            end = HEADER.size + size
            if len(received) < end:
                return
            body = received[HEADER.size : end]
            del received[:end]
            try:
                message = pickle.loads(body)
            except Exception as error:  # whatever its classes raise here
                reason = f"has said what cannot be read ({type(error).__name__}: {str(error)[:80]})"
                raise Unreadable(reason) from error
            yield message

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._selector.unregister(self.socket)
            self.socket.close()
