"""Server-sent events as a client reads them (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

import json
from typing import Any

DONE = "[DONE]"


def blocks_of(body: bytes) -> list[list[str]]:
    """The lines of each event of a whole stream; comments are left out."""
    *blocks, rest = body.decode().split("\n\n")
    assert rest == ""
    return [block.split("\n") for block in blocks if not block.startswith(":")]


def read_events(body: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream, which must end as it should."""
    *events, last = [data.removeprefix("data: ") for [data] in blocks_of(body)]
    assert last == DONE
    return [json.loads(event) for event in events]


def choices_of(events: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """The pieces of one choice."""
    return [choice for event in events for choice in event.get("choices", ()) if choice["index"] == index]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice, of a completion or a chat."""
    pieces = choices_of(events, index)
    return "".join(piece["text"] if "text" in piece else piece["delta"].get("content", "") for piece in pieces)


def reasons_of(events: list[dict[str, Any]], index: int = 0) -> list[str]:
    return [piece["finish_reason"] for piece in choices_of(events, index) if piece["finish_reason"] is not None]
