"""Thoughts, text and what stands between them and calls."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine.features.tool_calls.answer_parser import Call, Event, Reasoning, Text
from tests.features.tool_calls.test_parser import CALL, TOKYO, read, text_of, without_pieces, written


@pytest.mark.parametrize(
    ("text", "options", "events"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", {"thinks": True}, [Reasoning("Hm."), Text("Yes.")]),
        ("\n<think>\n\n</think>\n\nYes.", {"thinks": True}, [Text("Yes.")]),
        ("Yes. <think>", {"thinks": True}, [Text("Yes. <think>")]),
        ("<thin", {"thinks": True}, [Text("<thin")]),
        ("<think>Hm.", {"thinks": True}, [Reasoning("Hm.")]),
        ("<think>Hm.</think>", {}, [Text("<think>Hm.</think>")]),
        ("\nHm.\n</think>\nYes.\n", {"is_thinking": True}, [Reasoning("Hm."), Text("Yes.\n")]),
        ("\n<think>\nHm.</think>Yes.", {"is_thinking": True}, [Reasoning("Hm."), Text("Yes.")]),
        ("<th", {"is_thinking": True}, [Reasoning("<th")]),
        ("Hm.</think>\n\n", {"is_thinking": True}, [Reasoning("Hm.")]),
        ("A<|x|>B", {"dropped": ["<|x|>"]}, [Text("AB")]),
    ],
)
def test_thoughts_are_told_apart(text: str, options: dict[str, Any], events: list[Event]) -> None:
    assert read("hermes", text, **options) == events
    assert read(None, text, **options) == events


def test_calls_in_a_thought_are_none() -> None:
    text = f"<think>I could {written('hermes', ('now', {}))}</think>{written('hermes', ('weather', TOKYO))}"
    events = read("hermes", text, thinks=True)
    assert [type(event) for event in without_pieces(events)] == [Reasoning, Call]


def test_of_a_broken_call_in_a_thought_nothing_is_told() -> None:
    for call in ('{"name": "now", "arguments": {"a": x', '{"name": "now", "arguments": {"a": 1'):
        text = f"Hm. <tool_call>{call}"
        assert read("hermes", text, is_thinking=True, thought_calls=["<tool_call>"]) == [Reasoning(text)]


def test_white_space_between_calls_is_of_no_text() -> None:
    text = written("hermes", ("now", {}), ("now", {}))
    assert text_of(read("hermes", f"\n{text}\n\nDone.")) == "Done."
    assert text_of(read("hermes", f"I look: \n{text}\n")) == "I look:"
    assert text_of(read("hermes", f"I look:{text}done.")) == "I look:\ndone."
    assert text_of(read("llama3", f"I look: {CALL}; {CALL} Done.")) == "I look:   Done."
