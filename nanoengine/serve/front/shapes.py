"""Pings and last events of streams, in the shape of the interface of a path, while no model answers."""

from __future__ import annotations

from typing import Any

from nanoengine.serve.server.apis.anthropic import MessagesWriter
from nanoengine.serve.server.apis.event_stream import COMMENT, DONE
from nanoengine.serve.server.apis.json_response import encode
from nanoengine.serve.server.apis.ollama.chat import OllamaWriter


def media_type(path: str) -> bytes:
    """Of a stream."""
    return OllamaWriter.media_type if path.startswith("/api/") else MessagesWriter.media_type


def ping(path: str) -> bytes:
    """What clients of a path skip."""
    if path.startswith("/api/"):
        return OllamaWriter.ping
    return MessagesWriter.ping if path.startswith("/v1/messages") else COMMENT


def last_event(path: str, error: Any) -> bytes:
    """The end of a stream whose request failed after its first ping. `error`: the body of the answer otherwise, as
    `APIError.table` makes it.
    """
    if path.startswith("/api/"):
        return encode(error) + b"\n"
    if path.startswith("/v1/messages"):
        return b"event: error\ndata: " + encode(error) + b"\n\n"
    if path == "/v1/responses":
        event = {**error["error"], "type": "error", "code": str(error["error"]["code"]), "sequence_number": 0}
        return b"event: error\ndata: " + encode(event) + b"\n\n"
    if path == "/infill":
        return b"error: " + encode(error["error"]) + b"\n\n"
    return b"data: " + encode(error) + b"\n\n" + DONE
