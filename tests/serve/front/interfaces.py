"""Interfaces of clients: how a prompt is sent, and the text of the answer, whole or streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Interface:
    """An interface of clients.

    Args:
        path: of its endpoint.
        fields: of a body, of a prompt.
        whole: the text of an answer.
        piece: the text of an event of a stream, perhaps empty.
    """

    path: str
    fields: Callable[[str], dict[str, Any]]
    whole: Callable[[Any], str]
    piece: Callable[[Any], str]

    def body(self, model: str, prompt: str, *, stream: bool) -> dict[str, Any]:
        return {"model": model, "stream": stream, **self.fields(prompt)}

    def outcome(self, body: bytes) -> str:
        """The text of an answer, whole or streamed, or the message of its error; "cut" where it is not whole."""
        try:
            return self._text(json.loads(body))
        except ValueError:
            lines = re.findall(rb"^(?:data: |error: | *(?={))(.+)$", body, re.MULTILINE)
        events = [json.loads(line) if line.startswith(b"{") else line.decode() for line in lines if line != b"[DONE]"]
        tables = [event for event in events if isinstance(event, dict)]
        if errors := [
            event
            for event in tables
            if event.keys() & {"error"} or event.get("type") == "error" or event.keys() >= {"message", "code"}
        ]:
            return self._text(errors[0])
        return "".join(map(self.piece, events))

    def _text(self, answer: Any) -> str:
        error = answer.get("error") or (answer if answer.get("type") == "error" else None)
        if error is not None:
            return "error: " + (error if isinstance(error, str) else error["message"])
        return self.whole(answer)


def _chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _response_text(answer: Any) -> str:
    return "".join(part["text"] for item in answer["output"] for part in item.get("content", ()))


def _choice(event: Any) -> Any:
    return (event.get("choices") or [{}])[0]


GREEDY = {"temperature": 0, "max_tokens": 8}
OF_REAL = (
    Interface(
        "/v1/completions",
        lambda prompt: {"prompt": prompt, **GREEDY},
        lambda answer: answer["choices"][0]["text"],
        lambda event: _choice(event).get("text", ""),
    ),
    Interface(
        "/v1/chat/completions",
        lambda prompt: {"messages": _chat(prompt), **GREEDY},
        lambda answer: answer["choices"][0]["message"]["content"],
        lambda event: _choice(event).get("delta", {}).get("content") or "",
    ),
    Interface(
        "/v1/messages",
        lambda prompt: {"messages": _chat(prompt), **GREEDY},
        lambda answer: "".join(part["text"] for part in answer["content"]),
        lambda event: event.get("delta", {}).get("text", ""),
    ),
    Interface(
        "/v1/responses",
        lambda prompt: {"input": prompt, "temperature": 0, "max_output_tokens": 16},
        _response_text,
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    ),
    Interface(
        "/api/generate",
        lambda prompt: {"prompt": prompt, "options": {"temperature": 0, "num_predict": 8}},
        lambda answer: answer["response"],
        lambda event: event["response"],
    ),
)
OF_TOYS = (
    Interface(
        "/v1/completions",
        lambda prompt: {"prompt": prompt},
        lambda answer: answer["prompt"].replace(" ", ""),
        lambda event: str(event),
    ),
)
