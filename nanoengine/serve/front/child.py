"""Child: the process of one model, as the front starts, watches and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nanoengine.child_process import signal_name
from nanoengine.serve.front.upstream import NoAnswer, request
from nanoengine.serve.server.config import TLS, ServerConfig

Log = Callable[[dict[str, Any]], None]

COMMAND = (sys.executable, "-m", "nanoengine.serve.front.model_server")

POLL_SECONDS = 0.05
"""Seconds between two attempts to connect to a child that loads."""

MAX_LINE_BYTES = 1 << 16
"""The longest line of a child's log that is passed on whole."""

LOG_SECONDS = 1.0
"""For the last lines of the log of a process that has ended."""

MAX_CONNECTIONS = 1 << 20
"""Of a server."""

END_SECONDS = 20.0
"""Seconds beyond shutdown_timeout in which a child ends after SIGTERM; then it is killed."""


class Child:
    """A running process.

    Args:
        process: with a pipe as its standard input and error.
        socket: path of the Unix socket on which it answers.
        log: receives each line of its standard error, as the table that `Lines` has made of it.
    """

    def __init__(self, process: asyncio.subprocess.Process, socket: str, log: Log):
        self.process, self.socket, self._log = process, socket, log
        self.pid = process.pid
        self._last_line = ""
        self.ended = asyncio.ensure_future(self._watch())

    @classmethod
    async def start(cls, model: str, options: Mapping[str, Any], config: ServerConfig, log: Log) -> Child:
        """Start a process, which then loads.

        Args:
            model, options: see `LLM`.
            config: of its server; `front_socket` is its address.
            log: see the class.
        """
        assert config.front_socket is not None
        Path(config.front_socket).unlink(missing_ok=True)  # of the process before
        pipe = asyncio.subprocess.PIPE
        # A new session: Ctrl-C in a terminal is for the front, which then ends the child.
        process = await asyncio.create_subprocess_exec(
            *COMMAND, stdin=pipe, stderr=pipe, start_new_session=True, limit=MAX_LINE_BYTES
        )
        child = cls(process, config.front_socket, log)
        assert process.stdin is not None
        order = {"model": model, "options": dict(options), "config": dataclasses.asdict(config)}
        process.stdin.write(json.dumps(order).encode() + b"\n")
        return child

    async def ready(self) -> list[dict[str, Any]]:
        """The models in its /v1/models, once it serves. Raises NoAnswer with the last line of its log."""
        while not self.ended.done():
            with contextlib.suppress(NoAnswer):
                async with request(self.socket, "GET", "/v1/models") as answer:
                    return list(json.loads(await answer.body())["data"])
            await asyncio.wait({self.ended}, timeout=POLL_SECONDS)
        raise NoAnswer(self.reason)

    @property
    def reason(self) -> str:
        """Why it ended."""
        status = self.process.returncode
        if status is not None and status < 0:
            return f"its process was ended by {signal_name(-status)}"
        return self._last_line or f"its process ended with status {status}"

    async def end(self, seconds: float) -> None:
        """End the process: SIGTERM, and SIGKILL after so many seconds. Returns when its memory is the system's again."""
        self.terminate()
        await asyncio.wait({self.ended}, timeout=seconds)
        self.kill()
        await self.ended

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def _watch(self) -> None:
        """Wait for the end of the process. Its log may stay open: in processes that it has started."""
        log = asyncio.ensure_future(self._pass_log())
        await self.process.wait()
        await asyncio.wait({log}, timeout=LOG_SECONDS)
        log.cancel()

    async def _pass_log(self) -> None:
        assert self.process.stderr is not None
        while not self.process.stderr.at_eof():
            line = b"(a line that is too long)"
            with contextlib.suppress(ValueError):  # longer than MAX_LINE_BYTES
                line = await self.process.stderr.readline()
            if text := line.decode(errors="replace").strip():
                fields: dict[str, Any] = {"level": "warning", "message": text}  # of another library
                with contextlib.suppress(ValueError, RecursionError):
                    table = json.loads(text)
                    if isinstance(table, dict) and all(isinstance(table.get(key), str) for key in fields):
                        fields = table
                self._last_line = fields["message"]
                with contextlib.suppress(OSError):  # nobody reads ours any more; the process must not wait for that
                    self._log(fields)


def child_config(config: ServerConfig, name: str, socket: str, parts: int) -> ServerConfig:
    """The server of one model behind the front, which has checked keys, hosts and connections, and logs each request.

    Args:
        config: of the whole server.
        name: of the model.
        socket: its path.
        parts: most models that are loaded at a time, into which the quotas of waiting requests and of answers are divided.
    """
    without_tls: dict[str, Any] = dict.fromkeys(TLS)
    return dataclasses.replace(
        config,
        **without_tls,
        served_model_name=(name,),
        front_socket=socket,
        forwarded_allow_ips=None,
        cors_origin=None,
        max_connections=min(2 * config.max_connections, MAX_CONNECTIONS),
        max_waiting=-(-config.max_waiting // parts),
        max_waiting_tokens=max(1, config.max_waiting_tokens // parts),
        max_answer_bytes=max(4, config.max_answer_bytes // parts),
        access_log=False,
        log_format="json",
    )
