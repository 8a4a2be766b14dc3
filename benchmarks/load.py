"""`nanoengine serve` in a process of its own, for the benchmarks of servers."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.http_client import ask
from nanoengine.errors import NanoEngineError

SECONDS_TO_START = 300


class ServerGone(NanoEngineError):
    """The server that should be measured ended, or never began."""


@dataclass
class ServerProcess:
    """`nanoengine serve`, in a process of its own, with what it logs in a file."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def end_of_log(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    def resident_bytes(self) -> int:
        """Memory of the process that is in RAM (Linux)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.partition("VmRSS:")[2].split()[0])

    async def wait_ready(self) -> None:
        for _ in range(10 * SECONDS_TO_START):
            if self.process.poll() is not None:
                raise ServerGone(f"the server ended with {self.process.returncode}:\n{self.end_of_log()}")
            if (await ask(self.port, "/health")).status == 200:
                return
            await asyncio.sleep(0.1)
        raise ServerGone(f"the server was not ready after {SECONDS_TO_START} s:\n{self.end_of_log()}")


@asynccontextmanager
async def serving(model: str, options: dict[str, Any]) -> AsyncIterator[ServerProcess]:
    """A server of our own on a free port, ready; it is ended in the end. Options are those of `nanoengine serve`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.NamedTemporaryFile("w+b", prefix="server-", suffix=".log") as log:
        command = [sys.executable, "-m", "nanoengine", "serve", model, "--port", str(port), *flags(options)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        server = ServerProcess(process, port, Path(log.name))
        try:
            await server.wait_ready()
            yield server
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def flags(options: dict[str, Any]) -> Iterator[str]:
    """Options as a command line has them."""
    for name, value in options.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{dashed}" if value else f"--no-{dashed}"
        elif value is not None:
            yield from (f"--{dashed}", str(value))
