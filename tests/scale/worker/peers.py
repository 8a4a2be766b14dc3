"""Processes that are threads of this one, at the other end of a real socket: some of them stop to do what they should."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

Fault = Callable[[Connection], None]

LATE_SECONDS = 0.3
"""More than those who listen to a peer wait for it here."""


def silent(own: Connection) -> None:
    """Says no more; it reads, so that nothing else can tell."""
    with suppress(EOFError, OSError):
        while True:
            own.recv_bytes()


def deaf(own: Connection) -> None:
    """Is stopped: nothing is read, either."""
    own.poll(30.0)
    threading.Event().wait(LATE_SECONDS)


def dead(own: Connection) -> None:
    own.close()


def half(own: Connection) -> None:
    """Of a message is said."""
    _write(own, struct.pack("!i", 1000) + b"x" * 10)
    silent(own)


def garbage(own: Connection) -> None:
    _write(own, b"\x00\x00\x00\x05hello" * 3)
    silent(own)


def negative(own: Connection) -> None:
    _write(own, struct.pack("!i", -7))
    silent(own)


def absurd(own: Connection) -> None:
    _write(own, struct.pack("!iQ", -1, 1 << 60))
    silent(own)


def huge(own: Connection) -> None:
    """Announces as much as may be, and goes on with short ones."""
    _write(own, struct.pack("!i", (1 << 31) - 1))
    with suppress(EOFError, OSError):
        while True:
            own.recv_bytes()
            own.send("something")


def of_another_version(own: Connection) -> None:
    """A class that is not here."""
    own.send_bytes(b"cno_module_of_this_name\nThing\n.")
    silent(own)


def unexpected(own: Connection) -> None:
    own.send("what is this?")
    silent(own)


FAULTS: tuple[Fault, ...] = (silent, deaf, dead, half, garbage, negative, absurd, huge, of_another_version, unexpected)


def _write(own: Connection, data: bytes) -> None:
    with socket.socket(fileno=own.fileno()) as raw:
        raw.sendall(data)
        raw.detach()


class Peer:
    """Stands where a process would.

    Args:
        live: its life; whatever it raises is its death.
    """

    pid, first_message = 0, None

    def __init__(self, live: Callable[[Connection], None]):
        self.socket, other = socket.socketpair()
        self._other, self._connection = other, Connection(other.dup().detach())
        self.returncode: int | None = None
        threading.Thread(target=self._run, args=(live,), daemon=True).start()

    def _run(self, live: Callable[[Connection], None]) -> None:
        with suppress(EOFError, OSError, pickle.UnpicklingError):
            live(self._connection)
        self.kill()

    def kill(self) -> None:
        if self.returncode is None:
            self.returncode = -9
            with suppress(OSError):
                self._other.shutdown(socket.SHUT_RDWR)
            self._other.close()

    def wait(self, seconds: float) -> Any:
        return self.returncode

    def ending(self) -> str:
        return "was killed by SIGKILL"
