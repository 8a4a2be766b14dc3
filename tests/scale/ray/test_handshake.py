"""A front and a replica find each other, whoever else connects."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client
from typing import Any

import pytest

from nanoengine.errors import EngineDead
from nanoengine.scale.ray.handshake import accept, connect

KEY = b"key of this run"


def silent(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address)


def gone(address: tuple[str, int]) -> None:
    socket.create_connection(address).close()


def talkative(address: tuple[str, int]) -> socket.socket:
    own = socket.create_connection(address)
    own.sendall(b"GET / HTTP/1.1\r\n\r\n")
    return own


def dripping(address: tuple[str, int]) -> socket.socket:
    """No read takes long, and all together never end."""
    own = socket.create_connection(address)

    def drip() -> None:
        with suppress(OSError):
            for byte in (250).to_bytes(4, "big") + bytes(250):
                own.send(bytes([byte]))
                time.sleep(0.1)

    threading.Thread(target=drip, daemon=True).start()
    return own


def with_another_key(address: tuple[str, int]) -> None:
    def try_it() -> None:
        with pytest.raises(Exception):  # noqa: B017 # whatever it is told
            Client(address, authkey=b"another")

    threading.Thread(target=try_it, daemon=True).start()
    time.sleep(0.05)  # it comes first


@pytest.mark.parametrize("stranger", [silent, gone, talkative, dripping, with_another_key])
def test_strangers_are_sent_away(stranger: Callable[[tuple[str, int]], Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        own = stranger(address)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(connect(address, KEY, 20.0)))
        thread.start()
        with accept(server, KEY, 20.0, 0.2) as connection:
            thread.join()
            connection.send("hello")
            with found[0]:
                assert found[0].recv() == "hello"
                threading.Timer(0.5, lambda: found[0].send("later")).start()
                assert connection.recv() == "later", "once both know each other, they have time"
        if own is not None:
            own.close()


def test_silent_strangers_do_not_make_others_wait() -> None:
    """One behind the other they would take as long as there is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        strangers = [silent(server.getsockname()) for _ in range(24)]
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(connect(server.getsockname(), KEY, 20.0)))
        thread.start()
        with accept(server, KEY, 10.0, 5.0):
            thread.join()
            found[0].close()
        for own in strangers:
            own.close()


def test_who_does_not_come_is_told_with_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(EngineDead, match=r"nobody with the key of this run has come to .* within 0\.1 seconds"):
            accept(server, KEY, 0.1)
        with pytest.raises(EngineDead, match=r"has answered at .* within 0\.1 seconds \(EOFError"):
            connect(server.getsockname(), KEY, 0.1)
