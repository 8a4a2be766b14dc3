"""Pings and last events of streams, in the shape of the interface of a path, while no model answers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from nanoengine.serve.server.answers import COMMENT, DONE, encode
from nanoengine.serve.server.errors import Problem
from nanoengine.serve.server.messages import MessagesWriter
from nanoengine.serve.server.ollama import OllamaWriter


def media_type(path: str) -> bytes:
    """Of a stream."""
    return OllamaWriter.media_type if path.startswith("/api/") else MessagesWriter.media_type


def ping(path: str) -> bytes:
    """What clients of a path skip."""
    if path.startswith("/api/"):
        return OllamaWriter.ping
    return MessagesWriter.ping if path.startswith("/v1/messages") else COMMENT


def last_event(path: str, problem: Problem) -> bytes:
    """The end of a stream whose request failed after its first ping."""
    table = problem.table(path)
    if path.startswith("/api/"):
        return encode(table) + b"\n"
    if path.startswith("/v1/messages"):
        return b"event: error\ndata: " + encode(table) + b"\n\n"
    if path == "/v1/responses":
        event = {"type": "error", "code": str(problem.code or problem.status), "message": problem.message}
        return b"event: error\ndata: " + encode({**event, "param": problem.param, "sequence_number": 0}) + b"\n\n"
    if path == "/infill":
        return b"error: " + encode(table["error"]) + b"\n\n"
    return b"data: " + encode(table) + b"\n\n" + DONE


def problem_of_body(status: int, body: bytes) -> Problem:
    """The error that a server has answered with."""
    table: Any = None
    with contextlib.suppress(msgspec.DecodeError):
        table = msgspec.json.decode(body)
    error = table.get("error") if isinstance(table, Mapping) else None
    if isinstance(error, Mapping):
        return Problem(status, str(error.get("message", "")), error.get("param"))
    return Problem(status, str(error or f"the model's server answered {status}"))
