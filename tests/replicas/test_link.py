"""Messages on a socket of which nobody waits."""

from __future__ import annotations

import selectors
import socket
from multiprocessing.connection import Connection

import pytest

from nanoengine.replicas.link import Link


def test_messages_of_any_size_come_whole_and_in_order_and_nobody_waits() -> None:
    selector = selectors.DefaultSelector()
    own, other = socket.socketpair()
    link = Link(own, selector)
    link.register("me")
    messages = [
        b"",
        list(range(100)),
        b"x" * (3 << 20),
        "last",
    ]  # more than the socket takes: the other side does not read yet
    for message in messages:
        link.send(message)
    assert selector.get_key(link.socket).data == "me"
    assert selector.select(0) == [], "the socket is full"
    connection = Connection(other.detach())
    received = []
    while len(received) < len(messages):
        while not connection.poll(0):
            link.flush()
        received.append(recv(connection, link))
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
        link.receive()
    link.send("nobody hears it")
    link.close()
    link.close()
    link.send("nor this")
    assert not selector.get_map()


def recv(connection: Connection, link: Link) -> object:
    """A large message comes in pieces, which the link sends as there is room."""
    import threading

    result: list[object] = []
    thread = threading.Thread(target=lambda: result.append(connection.recv()))
    thread.start()
    while thread.is_alive():
        link.flush()
        thread.join(0.001)
    return result[0]
