"""A server in a thread of its own on a free port, and a client that can be as rude as any."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import uvicorn

from nanoengine.builder import Built
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.serve.server.admission.quota import Quota
from nanoengine.serve.server.config import ServerConfig
from nanoengine.serve.server.errors import TOO_LONG
from nanoengine.serve.server.http.app import http_settings
from nanoengine.serve.server.served_model import ServedModel
from tests.serve.aio.toys import PATIENCE, StepGate, assert_idle
from tests.serve.server.events import read_events

T = TypeVar("T")
THREADS = ThreadPoolExecutor(16)
JSON = {"content-type": "application/json"}


def until(condition: Callable[[], object]) -> None:
    """Wait until something is so, which another thread brings about."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)


def in_thread(ask: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
    return THREADS.submit(ask, *args, **kwargs)


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """What it says is wrong, in the one shape that errors have."""
        assert self.headers["content-type"] == "application/json"
        assert set(self.json) == {"error"}
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] in (self.status, TOO_LONG)
        assert isinstance(error["message"], str)
        assert error["message"]
        return dict(error)

    @property
    def events(self) -> list[dict[str, Any]]:
        assert self.status == 200
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        return read_events(self.body)


class Server:
    """A server that runs until it is closed.

    Args:
        built: its engine; nobody else uses it.
        name: of the model.
        config: see `ServerConfig`.
    """

    def __init__(self, built: Built, name: str = "model", **config: Any):
        self.gate = StepGate(built.engine)
        self.serving = ServedModel(lambda: built, ServerConfig(**config), name)
        self.serving.metrics_text.seconds = 0
        # With the protocol named, asyncio sends small segments at once.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(1024)
        self.address: tuple[str, int] = self._socket.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        settings = http_settings(self.serving)
        self.connections: Quota = settings.http.args[0]  # type: ignore[union-attr]
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        until(lambda: self._server.started)

    def close(self) -> None:
        self.gate.open()
        self._server.should_exit = True
        self._thread.join()
        self.serving.close()
        self._socket.close()

    # ---- a client

    def request(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """One call on a connection of its own; a body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, {**(JSON if data is not None else {}), **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        return self.request("POST", path, body, headers)

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, *contents: Any, **fields: Any) -> Answer:
        """A conversation of these contents, or messages; the first is the user's, and every other one after it."""
        messages = [
            content if isinstance(content, dict) else {"role": ("user", "assistant")[i % 2], "content": content}
            for i, content in enumerate(contents)
        ]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    def later(self, ask: Callable[..., Answer], *args: Any, **kwargs: Any) -> Future[Answer]:
        """Ask in a thread. When this returns, what was asked for is being made."""
        before = set(self.serving.jobs._jobs)  # one that was answered may still be in it for a moment
        future = in_thread(ask, *args, **kwargs)
        until(lambda: future.done() or set(self.serving.jobs._jobs) - before)
        return future

    def connect(self, data: bytes = b"") -> socket.socket:
        """A connection on which something was sent."""
        connection = socket.create_connection(self.address, timeout=PATIENCE)
        connection.sendall(data)
        return connection

    # ---- inside

    def metrics(self) -> Any:
        return self.call(self.serving.metrics.snapshot)

    def call(self, function: Callable[[LLMEngine], Any]) -> Any:
        """The result of a function of the engine, from its thread."""
        return asyncio.run(self.serving.engine.call(function))

    def wait_until_ended(self, count: int = 1) -> None:
        """Wait until so many jobs were told to end. They do when the engine has heard of it, before its next step."""
        until(lambda: sum(job.problem is not None for job in list(self.serving.jobs._jobs)) == count)

    def check_idle(self) -> None:
        """Nothing runs or waits, and every block is back, when the engine has heard of all that has ended."""
        until(lambda: not self.call(lambda engine: engine.has_unfinished))
        self.call(assert_idle)


def post_bytes(path: str, body: Any, headers: str = "") -> bytes:
    """A call as it goes over the wire."""
    data = json.dumps(body).encode()
    own = f"host: localhost\r\ncontent-type: application/json\r\n{headers}content-length: {len(data)}\r\n"
    return f"POST {path} HTTP/1.1\r\n{own}\r\n".encode() + data


def read_all(connection: socket.socket, size: int = 1 << 16) -> bytes:
    """What comes until the other end hangs up."""
    parts = []
    while part := connection.recv(size):
        parts.append(part)
    return b"".join(parts)


def body_of(response: bytes) -> bytes:
    """The body of a chunked answer."""
    rest = response.partition(b"\r\n\r\n")[2]
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
        if int(size, 16) == 0:
            break
    return b"".join(parts)
