"""Server-sent events as a client reads them (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

import json
from typing import Any

DONE = "[DONE]"


class EventReader:
    """Takes the bytes of a stream in pieces of any size, and gives the data of each event that is whole."""

    def __init__(self) -> None:
        self._line = b""
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[str]:
        events = []
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            text = line.removesuffix(b"\r").decode()  # a line is whole, and so are its characters
            name, _, value = text.partition(":")
            if not text and not self._data:  # behind a comment
                continue
            if not text:
                events.append("\n".join(self._data))
                self._data = []
            elif name == "data":
                self._data.append(value.removeprefix(" "))
            elif name:
                raise AssertionError(f"a line that no client of ours expects: {text!r}")
        return events

    @property
    def is_between(self) -> bool:
        """Whether the stream may end here."""
        return not self._line and not self._data


def read_events(body: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream, which must end as it should."""
    reader = EventReader()
    events = reader.feed(body)
    assert reader.is_between
    assert events[-1] == DONE
    assert DONE not in events[:-1]
    return [json.loads(event) for event in events[:-1]]


def choices_of(events: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """The pieces of one choice."""
    return [choice for event in events for choice in event.get("choices", ()) if choice["index"] == index]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice, of a completion or a chat."""
    pieces = choices_of(events, index)
    return "".join(piece["text"] if "text" in piece else piece["delta"].get("content", "") for piece in pieces)


def reasons_of(events: list[dict[str, Any]], index: int = 0) -> list[str]:
    return [piece["finish_reason"] for piece in choices_of(events, index) if piece["finish_reason"] is not None]
