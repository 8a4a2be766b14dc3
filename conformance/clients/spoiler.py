"""Spoiler: a proxy in front of a server that spoils one kind of number or name in all its answers. A check that passes behind it
sees nothing of that kind.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

OF_THE_CONNECTION = ("connection", "content-length", "date", "host", "server", "transfer-encoding")
"""Headers that each connection has for itself."""

Spoil = Callable[[str, str, Any], Any]
"""The new value of a field, of its name, the name of the field around it, and its value."""


def _logprobs(name: str, around: str, value: Any) -> Any:
    is_one = name in ("logprob", "token_logprobs") or around == "top_logprobs"
    return value - 0.5 if is_one and isinstance(value, float | int) else value


def _index(name: str, _: str, value: Any) -> Any:
    return 0 if name in ("index", "output_index") and isinstance(value, int) else value


def _usage(name: str, around: str, value: Any) -> Any:
    is_count = around.startswith("usage") or name in ("eval_count", "prompt_eval_count")
    return value + 1 if is_count and type(value) is int else value


def _ids(name: str, _: str, value: Any) -> Any:
    return "same" if name in ("id", "call_id", "item_id") and isinstance(value, str) else value


KINDS: Mapping[str, Spoil] = MappingProxyType(
    {"nothing": lambda *own: own[-1], "logprobs": _logprobs, "index": _index, "usage": _usage, "ids": _ids}
)
"""Log probabilities become 0.5 smaller, indices 0, numbers of tokens 1 larger, and ids alike."""


def spoiled(value: Any, spoil: Spoil, name: str = "", around: str = "") -> Any:
    """JSON with all its fields spoiled; what a list holds has the name of the list."""
    if isinstance(value, dict):
        return {key: spoiled(own, spoil, key, name) for key, own in value.items()}
    if isinstance(value, list):
        return [spoiled(own, spoil, name, around) for own in value]
    return spoil(name, around, value)


def spoiled_line(line: bytes, spoil: Spoil) -> bytes:
    """A line of an answer: an event, a line of JSON, or a whole body. What is no JSON stays."""
    start = b"data: " if line.startswith(b"data: ") else b""
    try:
        value = json.loads(line.removeprefix(start))
    except ValueError:
        return line
    return start + json.dumps(spoiled(value, spoil)).encode() + (b"\n" if line.endswith(b"\n") else b"")


@contextmanager
def spoiler(url: str, kind: str) -> Iterator[str]:
    """The address of a proxy, which runs in threads of this process.

    Args:
        url: of the server, without a path.
        kind: one of `KINDS`.
    """
    host, spoil = url.removeprefix("http://"), KINDS[kind]

    class Handler(BaseHTTPRequestHandler):  # of HTTP/1.0: an answer ends with its connection
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            kept = {name: own for name, own in self.headers.items() if name.lower() not in OF_THE_CONNECTION}
            server = http.client.HTTPConnection(host)
            try:
                server.request(self.command, self.path, body or None, kept | {"accept-encoding": "identity"})
                answer = server.getresponse()
                self.send_response(answer.status)
                for name, own in answer.getheaders():
                    if name.lower() not in OF_THE_CONNECTION:
                        self.send_header(name, own)
                self.end_headers()
                for line in answer:
                    self.wfile.write(spoiled_line(line, spoil))
                    self.wfile.flush()
            except ConnectionError:  # the client is gone
                pass
            finally:
                server.close()

        do_GET = do_POST = do_DELETE = _answer

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        proxy.daemon_threads = True
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{proxy.server_address[1]}"
        finally:
            proxy.shutdown()
