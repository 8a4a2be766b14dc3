"""How a front and a replica find each other on a network: both prove that they have the key of this run, in limited time."""

from __future__ import annotations

import socket
import struct
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from nanoengine.errors import EngineDead

CONNECT_SECONDS = 120.0
"""How long both look for each other."""

STRANGER_SECONDS = 5.0
"""How long one who has connected may take to prove that he has the key: meanwhile nobody else can."""


def accept(
    server: socket.socket, key: bytes, seconds: float = CONNECT_SECONDS, stranger_seconds: float = STRANGER_SECONDS
) -> Connection[Any, Any]:
    """The first who has the key; others are sent away.

    Raises:
        EngineDead: nobody has come in time.
    """
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        server.settimeout(left)
        try:
            own, _ = server.accept()
            return _prove(own, key, min(stranger_seconds, left), asks_first=True)
        except (OSError, EOFError, AuthenticationError):
            continue
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
    """The same socket, once both sides have proved it. A read that takes longer than that is an OSError."""
    own.setblocking(True)
    with own:
        connection = Connection(own.dup().detach())
        try:
            _limit_reads(own, seconds)
            for prove in (deliver_challenge, answer_challenge)[:: 1 if asks_first else -1]:
                prove(connection, key)
            _limit_reads(own, 0.0)
        except BaseException:
            connection.close()
            raise
    return connection


def _limit_reads(own: socket.socket, seconds: float) -> None:
    """Of all who have the same socket; 0: no limit."""
    limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
