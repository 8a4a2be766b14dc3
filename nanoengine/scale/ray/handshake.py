"""Handshake of a front and a replica on a network: each proves within a limited time that it has the key of this run."""

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
"""Limit of the proof of a process that has connected."""

MOST_STRANGERS = 64
"""Limit of connections that are checked at the same time; others wait."""

LOOK_SECONDS = 0.02
"""Interval at which `accept` checks whether a connection has passed."""


def accept(
    server: socket.socket, key: bytes, seconds: float = CONNECT_SECONDS, stranger_seconds: float = STRANGER_SECONDS
) -> Connection[Any, Any]:
    """The first connection whose other side has the key; other connections are closed.

    Raises:
        EngineDead: there was no such connection in time.
    """
    proven: SimpleQueue[Connection[Any, Any]] = SimpleQueue()
    permits = BoundedSemaphore(MOST_STRANGERS)

    def prove(stranger: socket.socket) -> None:
        with suppress(OSError, EOFError, AuthenticationError):
            proven.put(_prove(stranger, key, stranger_seconds, asks_first=True))
        permits.release()

    end = time.monotonic() + seconds
    server.settimeout(LOOK_SECONDS)
    while proven.empty() and time.monotonic() < end:
        if not permits.acquire(timeout=LOOK_SECONDS):
            continue
        try:
            stranger, _ = server.accept()
        except OSError:  # no connection has come
            permits.release()
            continue
        Thread(target=prove, args=(stranger,), daemon=True).start()
    if not proven.empty():
        return proven.get()
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


def _prove(peer: socket.socket, key: bytes, seconds: float, *, asks_first: bool) -> Connection[Any, Any]:
    """A connection over a socket, after both sides have proved that they have the key.

    Raises:
        EOFError, OSError, AuthenticationError: a proof is wrong, or was not in time.
    """
    peer.setblocking(True)
    with peer:
        connection = Connection(peer.dup().detach())
        # A limit of the whole handshake: a limit of each read would not end a peer that sends a byte now and then.
        limit = Timer(seconds, _hang_up, (peer,))
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


def _hang_up(peer: socket.socket) -> None:
    with suppress(OSError):  # the other side has closed it
        peer.shutdown(socket.SHUT_RDWR)
