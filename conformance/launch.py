"""Starts `nanoengine serve` on this machine for a suite of tests, and ends it again.

As a program: `launch.py MODEL [OPTION...] -- COMMAND...` runs the command with the server's address in $SERVER_URL.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

PYTHON = os.environ.get("NANOENGINE_PYTHON", sys.executable)
SECONDS_TO_START = 180

NO_ADAPTER = "no-adapter"
"""In the place of the folder of an adapter that only a hub has: options with it are dropped."""


@functools.cache
def known_options() -> frozenset[str]:
    """What `nanoengine serve` calls its options."""
    result = subprocess.run([PYTHON, "-m", "nanoengine", "serve", "--help"], capture_output=True, text=True, check=True)
    words = result.stdout.replace(",", " ").replace("[", " ").replace("]", " ").split()
    return frozenset(word for word in words if word.startswith("--"))


@functools.cache
def version() -> str:
    """The version of nanoengine that is tested."""
    command = [PYTHON, "-c", "import nanoengine; print(nanoengine.__version__)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def split_options(options: Sequence[str]) -> list[list[str]]:
    """Each option with its values: ["--port", "1", "--page"] is [["--port", "1"], ["--page"]]."""
    groups: list[list[str]] = []
    for word in itertools.chain.from_iterable(
        option.split("=", 1) if option.startswith("--") and "=" in option else [option] for option in options
    ):
        if word.startswith("--"):
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


class Server:
    """One `nanoengine serve`, up when the constructor returns.

    Args:
        model: what nanoengine calls the model.
        options: of `nanoengine serve`; those that it does not have are dropped, with a note on standard output.
        port: None takes a free one.

    Raises:
        RuntimeError: the server ended, or did not answer GET /health in time.
    """

    def __init__(self, model: str, options: Sequence[str] = (), *, port: int | None = None) -> None:
        groups = split_options(options)
        kept = [
            group for group in groups if group[0] in known_options() and not any(NO_ADAPTER in own for own in group)
        ]
        dropped = [" ".join(group) for group in groups if group not in kept]
        if dropped:
            print(f"options that nanoengine does not have: {', '.join(dropped)}")
        self.model, self.host = model, "127.0.0.1"
        self.port = free_port() if port is None else port
        self.url = f"http://{self.host}:{self.port}"
        command = [PYTHON, "-m", "nanoengine", "serve", model, "--host", self.host, "--port", str(self.port)]
        self.process = subprocess.Popen([*command, *(word for group in kept for word in group)], start_new_session=True)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        end = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self.process.returncode} before it served")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError(f"the server did not answer in {SECONDS_TO_START} s")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            print("the server did not end within 20 s of SIGTERM: killed")
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(arguments: Sequence[str]) -> int:
    at = list(arguments).index("--")
    (model, *options), command = arguments[:at], arguments[at + 1 :]
    with Server(model, options) as server:
        return subprocess.run(command, env={**os.environ, "SERVER_URL": server.url}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
