"""Calls of tools come in pieces: the name, then the arguments as the model writes them; what is no call is never told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.server.events import choices_of
from tests.serve.server.interface import Call, Interface, Table
from tests.serve.server.interfaces import CHAT, OLLAMA, each_way
from tests.serve.server.running import Answer
from tests.serve.server.streams import typed_events
from tests.serve.server.test_thinking import USER, Serve, says, serve

__all__ = ["serve"]  # a fixture

ROME, OSLO = ({"city": 'Rome, "the eternal"\nIT'}, {"city": "Oslo"})


def objects(*calls: Table, before: str = "", between: str = "", after: str = "") -> str:
    return before + between.join(json.dumps({"name": "weather", "arguments": own}) for own in calls) + after


def in_xml(own: Table, name: str = "weather") -> str:
    return f"<function={name}>\n<parameter=city>\n{own['city']}\n</parameter>\n</function>"


def message(own: Table) -> str:
    return f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{json.dumps(own)}<|call|>"


FORMATS = {
    "qwen2.5": objects(
        ROME, OSLO, before="<tool_call>\n", between="\n</tool_call>\n<tool_call>\n", after="\n</tool_call>"
    ),
    "qwen3-coder": f"<tool_call>\n{in_xml(ROME)}\n</tool_call>\n<tool_call>\n{in_xml(OSLO)}\n</tool_call>",
    "qwen3.5": f"</think>\n\n{in_xml(ROME)}\n</tool_call>\n{in_xml(OSLO)}",
    "granite": objects(ROME, OSLO, before="<|tool_call|>[", between=", ", after="]"),
    "harmony": message(ROME),  # the end of a call ends the answer
}


def pieces_of(talk: Interface, answer: Answer) -> list[tuple[str, list[str]]]:
    """The calls of a stream: each a name, and pieces of arguments that are not empty."""
    found: list[tuple[str, list[str]]] = []
    if talk is CHAT:
        for choice in choices_of(answer.events):
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    found.append((call["function"]["name"], []))
                found[call["index"]][1].append(call["function"]["arguments"])
    else:
        for event in typed_events(answer):
            begun = event.get("content_block") or event.get("item") or {}
            if event["type"] in ("content_block_start", "response.output_item.added") and "name" in begun:
                found.append((begun["name"], []))
            elif event["type"] == "response.function_call_arguments.delta":
                found[-1][1].append(event["delta"])
            elif "partial_json" in event.get("delta", ()):
                found[-1][1].append(event["delta"]["partial_json"])
    return [(name, [own for own in pieces if own]) for name, pieces in found]


def asked(talk: Interface, **more: Any) -> Table:
    return talk.body([USER], tools=("weather", "now"), model="scripted", **{"max_tokens": 400, **more})


@pytest.mark.parametrize(("talk", "name"), each_way(FORMATS))
def test_arguments_come_as_they_are_written(serve: Serve, talk: Interface, name: str) -> None:
    server, script = serve(name)
    script.text = FORMATS[name]
    answer = server.post(talk.path, asked(talk) | talk.streaming)
    calls = [ROME] if name == "harmony" else [ROME, OSLO]
    assert says(talk.read(talk.put_together(answer)), *(Call("weather", own) for own in calls))
    assert talk is OLLAMA or all(len(pieces) > 5 for _, pieces in pieces_of(talk, answer))


@pytest.mark.parametrize(("talk", "name"), [own for own in each_way(FORMATS) if own.values[0] is not OLLAMA])
def test_a_call_that_breaks_off_is_begun_in_a_stream_and_left_out_of_a_whole_answer(
    serve: Serve, talk: Interface, name: str
) -> None:
    server, script = serve(name)
    script.text = FORMATS[name]
    begun = FORMATS[name][: FORMATS[name].index("eternal")]
    body = asked(talk, max_tokens=len(script.encode(begun)))
    [(called, pieces)] = pieces_of(talk, server.post(talk.path, body | talk.streaming))
    assert called == "weather"
    assert json.dumps(ROME).startswith("".join(pieces))
    assert pieces
    whole = talk.read(server.post(talk.path, body | {"stream": False}).json)
    assert not any(isinstance(own, Call) for own in whole.parts)
    assert whole.reason == talk.reasons.get("length", "length")
