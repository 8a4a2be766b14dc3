"""TemplateClient: has chat templates rendered in a process whose time and memory are limited."""

from __future__ import annotations

import marshal
import os
import signal
import subprocess
import sys
import threading
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from nanoengine.errors import InvalidPrompt
from nanoengine.models import template_process as limits

COMMAND = [sys.executable, "-I", limits.__file__]

MAX_WAIT = 60.0
"""Seconds until an answer must be there, on however busy a machine."""

MAX_DYING = 0.5
"""Seconds that the process has to end by itself: how it does so says what it died of."""

OTHER = "the limit of a text: send less, or give another template by the option chat_template"
DEATHS: dict[int | None, str] = {
    -signal.SIGPROF: f"takes more than {limits.MAX_SECONDS:g} s of a CPU, {OTHER}",
    limits.TOO_LARGE: f"takes more than {limits.MAX_BYTES >> 20} MiB, or makes more than {limits.MAX_TEXT_BYTES >> 20}, {OTHER}",
}
"""What a template does to the process, by its status."""


class TemplateClient:
    """Any thread may ask; one text is rendered at a time. The process starts with the first, and ends with this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def render(self, template: str, values: Any) -> str:
        """The text that a template makes of values of JSON's types; with None, it is only compiled.

        Raises:
            InvalidPrompt: the template refuses the values, with its own words, is broken, or takes more than its limits.
        """
        with self._lock:
            process = self._process
            try:
                if process is None or not process.is_there():
                    process = self._process = _Process()
                answer = process.ask(marshal.dumps((template, values)))
            except BaseException as error:  # nobody knows what it would answer next
                status = None if process is None else process.end()
                if not isinstance(error, OSError | EOFError):
                    raise
                why = DEATHS.get(
                    status, f"was not rendered, its process ended with status {status} ({error}): ask again"
                )
                raise InvalidPrompt(f"the chat template {why}") from error
        text = answer[1:].decode(errors="surrogatepass")
        if answer[:1] != limits.OK:
            raise InvalidPrompt(f"the chat template refused the messages: {text}")
        return text


class _Process:
    def __init__(self) -> None:
        self._connection, its = Pipe()
        with its:
            command, silent = [*COMMAND, str(its.fileno())], subprocess.DEVNULL
            # Another group: Ctrl-C is for this process.
            self._own = subprocess.Popen(command, pass_fds=[its.fileno()], process_group=0, stdin=silent, stderr=silent)
        self._pid = os.getpid()
        self.end = weakref.finalize(self, _end, self._own, self._connection)

    def is_there(self) -> bool:
        """Whether it can be asked, from this process: not from one that has forked."""
        return self.end.alive and self._pid == os.getpid() and self._own.poll() is None

    def ask(self, question: bytes) -> bytes:
        """Raises OSError or EOFError: it has ended, or does not answer in time."""
        self._connection.send_bytes(question)
        if not self._connection.poll(MAX_WAIT):
            raise TimeoutError
        return self._connection.recv_bytes(limits.MAX_TEXT_BYTES)


def _end(process: subprocess.Popen[bytes], connection: Connection) -> int | None:
    """Its status, if it has ended by itself; else it is killed. (Who has forked has no such child, and waits for none.)"""
    connection.close()
    try:
        return process.wait(MAX_DYING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None
