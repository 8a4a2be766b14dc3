"""Messages on a socket of which nobody waits."""

from __future__ import annotations

import selectors
import socket
import threading
from multiprocessing.connection import Connection

import pytest

from nanoengine.scale.worker.link import Link, Unreadable, framed


def test_messages_of_any_size_come_whole_and_in_order_and_nobody_waits() -> None:
    selector = selectors.DefaultSelector()
    own, other = socket.socketpair()
    link = Link(own, selector, "me")
    messages = [b"", list(range(100)), b"x" * (3 << 20), "last"]  # more than the socket takes
    for message in messages:
        link.send(message)
    assert selector.get_key(link.socket).data == "me"
    assert selector.select(0) == [], "the socket is full"
    connection, received = Connection(other.detach()), list[object]()
    reader = threading.Thread(target=lambda: received.extend(connection.recv() for _ in messages))
    reader.start()
    while reader.is_alive():
        link.flush()
        reader.join(0.001)
    assert received == messages
    assert selector.get_key(link.socket).events == selectors.EVENT_READ, "nothing is left to send"
    for message in messages:
        if message != messages[2]:
            connection.send(message)
    got: list[object] = []
    while len(got) < len(messages) - 1:
        got += link.receive()
    assert got == [messages[0], messages[1], messages[3]]
    connection.close()
    with pytest.raises(EOFError):
        list(link.receive())
    link.send("nobody hears it")
    link.close()
    link.close()
    link.send("nor this")
    assert not selector.get_map()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xff\xff\xf0", "has announced a message of -16 bytes"),
        (b"\0\0\0\3abc", "has said what cannot be read \\(UnpicklingError"),
        (b"\0\0\0\0", "has said what cannot be read \\(EOFError"),
        (b"\0\0\0\x09cnone\nx\n.", "has said what cannot be read \\(ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_read_is_told_behind_what_can(data: bytes, message: str) -> None:
    own, other = socket.socketpair()
    with selectors.DefaultSelector() as selector, other:
        link = Link(own, selector, "me")
        other.sendall(framed("before") + data + framed("behind"))
        received = link.receive()
        assert next(received) == "before"
        with pytest.raises(Unreadable, match=message):
            next(received)
        link.close()


def test_nothing_is_received_on_a_link_that_was_closed_meanwhile() -> None:
    own, other = socket.socketpair()
    with selectors.DefaultSelector() as selector, other:
        link = Link(own, selector, "me")
        other.sendall(framed(1) + framed(2))
        for message in link.receive():
            assert message == 1
            link.close()
