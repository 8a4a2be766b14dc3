"""Link: messages to and from a replica on a socket, for one that serves many: nothing here waits.

The framing is that of `multiprocessing.connection.Connection`, which the replica uses, for messages below 2 GiB.
"""

from __future__ import annotations

import pickle
import selectors
import socket
import struct
from collections import deque
from typing import Any

HEADER = struct.Struct("!i")
READ_BYTES = 1 << 18


class Link:
    """Messages are pickled: the other side must be trusted, as a process of one's own is.

    Args:
        own: connected; it belongs to the link now.
        selector: told when there is something to send.
    """

    def __init__(self, own: socket.socket, selector: selectors.BaseSelector):
        own.setblocking(False)
        self.socket, self._selector = own, selector
        self._owner: Any = None
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self._is_full = False  # the socket, which takes no more now
        self.is_closed = False

    def register(self, owner: Any) -> None:
        """Have the selector look at it; the data of its key is `owner`."""
        self._owner = owner
        self._selector.register(self.socket, selectors.EVENT_READ, owner)

    def send(self, message: Any) -> None:
        """Send it now or as soon as that does not wait; to one who is gone, nothing is sent."""
        if self.is_closed:
            return
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._unsent.append(memoryview(HEADER.pack(len(body)) + body))
        if not self._is_full:
            self.flush()

    def flush(self) -> None:
        """Send what may be sent without waiting."""
        try:
            while self._unsent:
                sent = self.socket.send(self._unsent[0])
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            pass  # the rest is sent when there is room
        except OSError:  # it is gone, which reading will tell
            self._unsent.clear()
        if bool(self._unsent) is not self._is_full:
            self._is_full = not self._is_full
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._is_full else 0)
            self._selector.modify(self.socket, events, self._owner)

    def receive(self) -> list[Any]:
        """Messages that have come whole.

        Raises:
            EOFError: nobody is at the other end any more.
        """
        try:
            piece = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError(str(error)) from error
        if not piece:
            raise EOFError("closed by the other side")
        received = self._received
        received += piece
        messages: list[Any] = []
        start = 0
        while len(received) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(received, start)
            first = start + HEADER.size
            if len(received) - first < size:
                break
            messages.append(pickle.loads(memoryview(received)[first : first + size]))
            start = first + size
        del received[:start]
        return messages

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._selector.unregister(self.socket)
            self.socket.close()
