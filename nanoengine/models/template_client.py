"""TemplateClient: renders chat templates in a process with limits of time and memory."""

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
"""Limit of the seconds for an answer, also on a busy machine."""

MAX_DYING = 0.5
"""Seconds for the process to end by itself: its status has the reason."""

OTHER = "the limit of a text: send less, or use another template by the option chat_template"
DEATHS: dict[int | None, str] = {
    -signal.SIGPROF: f"takes more than {limits.MAX_SECONDS:g} s of a CPU, {OTHER}",
    limits.TOO_LARGE: f"takes more than {limits.MAX_BYTES >> 20} MiB, or makes more than {limits.MAX_TEXT_BYTES >> 20}, {OTHER}",
}
"""The reasons of the status of an ended process."""


class TemplateClient:
    """A renderer for any thread, one text at a time. The process starts with the first text, and ends with this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def render(self, template: str, values: Any) -> str:
        """The text of a template with variables of JSON's types; None: only compile the template.

        Raises:
            InvalidPrompt: the template refuses the values, with its message, is broken, or exceeds its limits.
        """
        with self._lock:
            process = self._process
            try:
                if process is None or not process.is_alive():
                    process = self._process = _Process()
                answer = process.request(marshal.dumps((template, values)))
            except BaseException as error:  # the state of the process is unknown
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
            self._popen = subprocess.Popen(
                command, pass_fds=[its.fileno()], process_group=0, stdin=silent, stderr=silent
            )
        self._pid = os.getpid()
        self.end = weakref.finalize(self, _end, self._popen, self._connection)

    def is_alive(self) -> bool:
        """Whether it is running, and was started by this process, not by its parent before a fork."""
        return self.end.alive and self._pid == os.getpid() and self._popen.poll() is None

    def request(self, message: bytes) -> bytes:
        """The answer of the process. Raises OSError or EOFError: it has ended, or is too late."""
        self._connection.send_bytes(message)
        if not self._connection.poll(MAX_WAIT):
            raise TimeoutError
        return self._connection.recv_bytes(limits.MAX_TEXT_BYTES)


def _end(process: subprocess.Popen[bytes], connection: Connection) -> int | None:
    """The status of the process if it ends by itself; else it is killed. (A fork has no such child, and does not wait.)"""
    connection.close()
    try:
        return process.wait(MAX_DYING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None
