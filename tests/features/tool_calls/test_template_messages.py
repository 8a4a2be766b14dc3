"""Conversations as OpenAI's clients write them, as templates take them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanoengine.features.tool_calls.template_messages import as_text, for_template


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def turn(*arguments: Any, **rest: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call(own) for own in arguments], **rest}


@pytest.mark.parametrize(
    ("arguments", "table"),
    [('{"city": "Rome"}', {"city": "Rome"}), ({"a": 1}, {"a": 1}), ("{", "{"), ("[1]", "[1]"), (None, {}), ("", {})],
)
def test_arguments_are_tables(arguments: Any, table: Any) -> None:
    [found] = for_template([turn(arguments)])
    assert found == turn(table, content="")


def test_other_fields_and_the_clients_own_messages_stay_as_they_are() -> None:
    messages = [{"role": "developer", "content": "Be short."}, turn("{}", content="I look.", reasoning_content="Hm.")]
    before = json.dumps(messages)
    developer, assistant = for_template(messages)
    assert developer == {"role": "system", "content": "Be short."}
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "Hm.")
    assert json.dumps(messages) == before
    odd: list[Any] = [
        5,
        {"role": "assistant", "content": None},
        {"role": "assistant", "tool_calls": [5, {"function": 5}]},
    ]
    assert for_template(odd)[:2] == odd[:2]


def test_in_words_everything_is_text() -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    history = for_template([turn('{"city": "Rome"}', content="I look."), {"role": "tool", "content": "Sunny"}])
    system, assistant, user = as_text(history, [tool])
    assert (system["role"], json.dumps(tool) in system["content"]) == ("system", True)
    text = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert assistant == {"role": "assistant", "content": text}
    assert user == {"role": "user", "content": "<tool_response>\nSunny\n</tool_response>"}
    assert as_text(history, None) == [assistant, user]
    [merged] = as_text([{"role": "system", "content": "Be short."}], [tool])
    assert merged["content"] == f"Be short.\n\n{system['content']}"
