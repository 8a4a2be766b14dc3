"""Streams of the interfaces whose events have names, or are lines."""

from __future__ import annotations

import json
from typing import Any

from tests.serve.server.events import blocks_of
from tests.serve.server.running import Answer


def typed_events(answer: Answer) -> list[dict[str, Any]]:
    """Server-sent events that say twice what they are; those without data are left out."""
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = []
    for name, data in blocks_of(answer.body):
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def lines(answer: Answer) -> list[dict[str, Any]]:
    """Lines of JSON."""
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/x-ndjson"
    *found, rest = answer.body.decode().split("\n")
    assert rest == ""
    return [json.loads(line) for line in found]
