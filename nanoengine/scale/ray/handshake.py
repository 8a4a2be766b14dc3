"""The handshake of a front and a replica on a network: each proves within a limited time that it has the key of this run."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue
from threading import BoundedSemaphore, Thread, Timer
from typing import Any

from nanoengine.errors import EngineDead

CONNECT_SECONDS = 120.0
"""Limit of the handshake, on both sides."""

STRANGER_SECONDS = 5.0
"""How long a process that has connected may take to prove that it has the key."""

MOST_STRANGERS = 64
"""Most connections that are checked at the same time; others wait."""

LOOK_SECONDS = 0.02
"""How often `accept` checks whether a connection has passed."""


def accept(
    server: socket.socket, key: bytes, seconds: float = CONNECT_SECONDS, stranger_seconds: float = STRANGER_SECONDS
) -> Connection[Any, Any]:
    """The first connection whose other side has the key; other connections are closed.

    Raises:
        EngineDead: there was none in time.
    """
    found: SimpleQueue[Connection[Any, Any]] = SimpleQueue()
    places = BoundedSemaphore(MOST_STRANGERS)

    def prove(own: socket.socket) -> None:
        with suppress(OSError, EOFError, AuthenticationError):
            found.put(_prove(own, key, stranger_seconds, asks_first=True))
        places.release()

    end = time.monotonic() + seconds
    server.settimeout(LOOK_SECONDS)
    while found.empty() and time.monotonic() < end:
        if not places.acquire(timeout=LOOK_SECONDS):
            continue
        try:
            own, _ = server.accept()
        except OSError:  # no connection has come
            places.release()
            continue
        Thread(target=prove, args=(own,), daemon=True).start()
    if not found.empty():
        return found.get()
    raise EngineDead(f"nobody with the key of this run has come to {server.getsockname()} within {seconds:g} seconds")


def connect(address: tuple[str, int], key: bytes, seconds: float = CONNECT_SECONDS) -> Connection[Any, Any]:
    """A connection to the process that accepts at this address.

    Raises:
        EngineDead: it has not answered in time, or it does not have the key.
    """
    try:
        return _prove(socket.create_connection(address, seconds), key, seconds, asks_first=False)
    except (OSError, EOFError, AuthenticationError) as error:
        reason = f"no replica with the key of this run has answered at {address} within {seconds:g} seconds"
        raise EngineDead(f"{reason} ({type(error).__name__}: {error})") from error


def _prove(own: socket.socket, key: bytes, seconds: float, *, asks_first: bool) -> Connection[Any, Any]:
    """The connection of a socket, after both sides have proved that they have the key.

    Raises:
        EOFError, OSError, AuthenticationError: they have not, or not in time.
    """
    own.setblocking(True)
    with own:
        connection = Connection(own.dup().detach())
        # A limit of the whole handshake: a limit of each read would not end a peer that sends a byte now and then.
        limit = Timer(seconds, _hang_up, (own,))
        limit.start()
        try:
            for prove in (deliver_challenge, answer_challenge)[:: 1 if asks_first else -1]:
                prove(connection, key)
        except BaseException:
            connection.close()
            raise
        finally:
            limit.cancel()
            limit.join()
    return connection


def _hang_up(own: socket.socket) -> None:
    with suppress(OSError):  # the other side has closed it
        own.shutdown(socket.SHUT_RDWR)
