"""Server-sent events: an answer in chunks, each made of what all of a stream have in common and a few pieces of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
]


class Chunks:
    """The events of one stream.

    Args:
        common: what every chunk says: id, object, created, model.
        fingerprint: of the server; said at the end.
    """

    def __init__(self, common: Mapping[str, Any], fingerprint: str):
        self._head = b"data: " + encode(common)[:-1] + b',"choices":['
        self._fingerprint = b',"system_fingerprint":' + encode(fingerprint)

    def chunk(self, choice: bytes, rest: bytes = b"") -> bytes:
        """One event: a choice, and what else belongs to the chunk, from a comma on."""
        return b"".join((self._head, choice, b"]", rest, b"}\n\n"))

    def usage(self, usage: bytes) -> bytes:
        """The last chunk of a stream that reports usage, which has no choice."""
        return self.chunk(b"", b',"usage":' + usage + self._fingerprint)

    def last(self, choice: bytes, rest: bytes) -> bytes:
        """The last chunk of one that does not."""
        return self.chunk(choice, rest + self._fingerprint)


def usage_json(num_prompt: int, num_completion: int) -> bytes:
    """Tokens in and out, as a piece of a chunk."""
    return b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (
        num_prompt,
        num_prompt + num_completion,
        num_completion,
    )


def error_event(body: bytes) -> bytes:
    """What a client is told when an answer that has begun cannot go on."""
    return b"data: " + body + b"\n\n"
