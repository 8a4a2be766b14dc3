"""How a front and a replica find each other on a network: both prove that they have the key of this run, in limited time."""

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
"""How long both look for each other."""

STRANGER_SECONDS = 5.0
"""How long one who has connected may take to prove that he has the key."""

MOST_STRANGERS = 64
"""Who may try to prove it at the same time; others wait."""

LOOK_SECONDS = 0.02
"""How often it is looked whether one has proved it."""


def accept(
    server: socket.socket, key: bytes, seconds: float = CONNECT_SECONDS, stranger_seconds: float = STRANGER_SECONDS
) -> Connection[Any, Any]:
    """The first who has the key; others are sent away.

    Raises:
        EngineDead: nobody has come in time.
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
        except OSError:  # nobody has come
            places.release()
            continue
        Thread(target=prove, args=(own,), daemon=True).start()
    if not found.empty():
        return found.get()
    raise EngineDead(f"nobody with the key of this run has come to {server.getsockname()} within {seconds:g} seconds")


def connect(address: tuple[str, int], key: bytes, seconds: float = CONNECT_SECONDS) -> Connection[Any, Any]:
    """The connection to who accepts there.

    Raises:
        EngineDead: nobody has answered in time, or somebody without the key.
    """
    try:
        return _prove(socket.create_connection(address, seconds), key, seconds, asks_first=False)
    except (OSError, EOFError, AuthenticationError) as error:
        reason = f"no replica with the key of this run has answered at {address} within {seconds:g} seconds"
        raise EngineDead(f"{reason} ({type(error).__name__}: {error})") from error


def _prove(own: socket.socket, key: bytes, seconds: float, *, asks_first: bool) -> Connection[Any, Any]:
    """The same socket, once both sides have proved it. If that takes longer, it is an EOFError or an OSError."""
    own.setblocking(True)
    with own:
        connection = Connection(own.dup().detach())
        limit = Timer(seconds, _hang_up, (own,))  # of all: who sends a byte now and then would be read forever
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
    with suppress(OSError):  # the other side has
        own.shutdown(socket.SHUT_RDWR)
