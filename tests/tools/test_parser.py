"""What an answer says: every way to cut its text gives the same, and what is no call is text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.tools.formats import FORMATS, PLAIN
from nanoengine.tools.parser import AnswerParser, Call, Event, Reasoning, Text
from tests.drawn import FAST

BY_NAME = {own.name: own for own in (*FORMATS, PLAIN)}
NAMES = ("weather", "now")
TOKYO, CALL, NOW = (
    {"city": 'Tokyo "}]</tool_call>\\'},
    '{"name": "weather", "arguments": {"city": "A"}}',
    '{"name": "now"}',
)


def written(name: str, *calls: tuple[str, Any]) -> str:
    """Calls as a model of a format writes them."""
    key = BY_NAME[name].arguments
    objects = [json.dumps({"name": own, key: arguments}) for own, arguments in calls]
    as_list = "[" + ", ".join(objects) + "]"
    return {
        "harmony": "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{own} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
            for own, arguments in calls
        ),
        "mistral_args": "".join(f"[TOOL_CALLS]{own}[ARGS]{json.dumps(arguments)}" for own, arguments in calls),
        "mistral": "[TOOL_CALLS]" + as_list,
        "phi": "<|tool_call|>" + as_list + "<|/tool_call|>",
        "granite": "<|tool_call|> " + as_list,
        "functools": "functools" + as_list,
        "hermes": "\n".join(f"<tool_call>\n{own}\n</tool_call>" for own in objects),
        "llama3": "; ".join(objects),
        "json": "\n".join(objects),
    }[name]


def read(name: str | None, *pieces: str, **options: Any) -> list[Event]:
    """What it says, text that follows text joined."""
    parser = AnswerParser(None if name is None else BY_NAME[name], options.pop("names", NAMES), **options)
    events = [event for piece in pieces for event in parser.push(piece)]
    joined: list[Event] = []
    for event in (*events, *parser.finish()):
        last = joined[-1] if joined else None
        if isinstance(event, Text | Reasoning) and isinstance(last, type(event)):
            joined[-1] = type(event)(last.text + event.text)
        else:
            joined.append(event)
    return joined


def calls_of(events: list[Event]) -> list[tuple[str, Any]]:
    found = [event for event in events if isinstance(event, Call)]
    assert [own.index for own in found] == list(range(len(found)))
    return [(own.name, json.loads(own.arguments)) for own in found]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


# ---- each format


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize(
    "calls", [[("weather", TOKYO)], [("now", {})], [("weather", TOKYO), ("now", {}), ("weather", {"a": [{}, -1.5e3]})]]
)
def test_calls_are_read(name: str, calls: list[tuple[str, Any]]) -> None:
    assert calls_of(read(name, written(name, *calls))) == calls
    assert text_of(read(name, written(name, *calls))) == ""


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"harmony"}))
def test_text_around_calls_is_told(name: str) -> None:
    events = read(name, "I look.\n" + written(name, ("weather", TOKYO)) + "\nThat was it.\n")
    assert [type(event) for event in events] == [Text, Call, Text]
    assert text_of(events) == "I look.\n\nThat was it."


@pytest.mark.parametrize("name", BY_NAME)
def test_calls_of_unknown_tools_are_text(name: str) -> None:
    text = written(name, ("sudo", {"a": 1}))
    events = read(name, text)
    assert calls_of(events) == []
    assert '{"a": 1}' in text_of(events)
    assert calls_of(read(name, text, names=None)) == [("sudo", {"a": 1})]


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"harmony"}))
def test_broken_calls_are_text(name: str) -> None:
    whole = written(name, ("weather", {"city": "A"}), ("now", {"b": "B"}))
    for end in range(len(whole)):
        events = read(name, whole[:end], names=("weather", "now"))
        assert len(calls_of(events)) <= 2
        if not calls_of(events):
            assert text_of(events) == whole[:end]
    for broken in (whole.replace('"', "'"), whole.replace(":", ": x"), whole.replace("}", "]")):
        assert (text_of(read(name, broken)), calls_of(read(name, broken))) == (broken, [])


@pytest.mark.parametrize("name", BY_NAME)
def test_plain_text_stays_as_it_is(name: str) -> None:
    for text in (
        "",
        " \n",
        "Hello {you}, [1] and <b>.\n",
        'use functools.lru_cache\n{"a": 1}\n{',
        "x < 3 <tool",
        "to be",
    ):
        assert text_of(read(name, text)) == text


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("granite", f"<tool_call>[{CALL}]", [("weather", {"city": "A"})]),
        ("hermes", f"<tool_call>{CALL}</tool_call><tool_call>[{NOW}]", [("weather", {"city": "A"}), ("now", {})]),
        ("hermes", f"<tool_call>{{oh no <tool_call>{CALL}</tool_call>", [("weather", {"city": "A"})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}', [("now", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}', [("now", {})]),
        ("hermes", '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {}}}', [("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": "\\ud800"}}', [("now", {"x": "\ud800"})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": 1e999}}', []),
        ("hermes", '<tool_call>{"name": "now", "arguments": [1]}', []),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": ' + "[" * 9999 + "]" * 9999 + "}}", []),
        ("hermes", f"<tool_call>[{CALL}, 5]", []),
        ("llama3", f"Here: {CALL}\n{NOW}", [("weather", {"city": "A"}), ("now", {})]),
        ("llama3", '{"type": "function", "name": "now", "parameters": {}}', [("now", {})]),
        ("phi", f"<|tool_call|>{CALL}<|/tool_call|>functools[{NOW}]", [("weather", {"city": "A"}), ("now", {})]),
        ("mistral_args", f"[TOOL_CALLS] [{CALL}]", [("weather", {"city": "A"})]),
        ("mistral_args", '[TOOL_CALLS]now[CALL_ID]abc123[ARGS]{"a": 1}', [("now", {"a": 1})]),
        ("mistral_args", '[TOOL_CALLS]now{"a": 1}Then.', [("now", {"a": 1})]),
        ("mistral_args", '[TOOL_CALLS]now[ARGS]{"a": "1\n2"}', [("now", {"a": "1\n2"})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": "1\n\t2"}}', [("now", {"x": "1\n\t2"})]),
        ("mistral_args", "[TOOL_CALLS]now and then, " * 50, []),
        ("harmony", "<|channel|>commentary to=functions.now<|message|><|call|>", [("now", {})]),
        ("harmony", ' to=functions.now<|channel|>commentary json<|message|>{"a": 1}', [("now", {"a": 1})]),
        ("harmony", "<|channel|>commentary to=functions.now<|message|>foo", []),
    ],
)
def test_what_models_write_beside_their_format(name: str, text: str, calls: list[Any]) -> None:
    assert calls_of(read(name, text)) == calls


def test_arguments_can_always_be_sent() -> None:
    """Half of a surrogate pair is escaped; other characters are as they are."""
    [call] = read("hermes", '<tool_call>{"name": "now", "arguments": {"x": "\\ud800", "y": "é"}}')
    assert isinstance(call, Call)
    assert call.arguments == '{"x": "\\ud800", "y": "\\u00e9"}'
    [call] = read("hermes", '<tool_call>{"name": "now", "arguments": {"y": "é"}}')
    assert isinstance(call, Call)
    assert call.arguments == '{"y": "é"}'


def test_no_more_calls_than_asked_for_are_told() -> None:
    text = written("hermes", ("now", {}), ("weather", TOKYO))
    assert calls_of(read("hermes", text, most=1)) == [("now", {})]


# ---- thoughts


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
    assert [type(event) for event in events] == [Reasoning, Call]


@pytest.mark.parametrize("size", [950, 990, 1000, 1001, 5000])
def test_a_head_of_harmony_has_an_end(size: int) -> None:
    """Otherwise it would be read again with each piece; beyond it is text, however it is cut."""
    text = f"<|channel|>{'a' * (size - 11)}<|message|>Yes."
    whole = read("harmony", text)
    assert whole == read("harmony", *text)
    assert (whole == [Text("Yes.")]) == (size <= 1000)
    assert "".join(event.text for event in whole if isinstance(event, Text)).endswith("Yes.")


def test_the_channels_of_harmony() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    text += f"<|start|>assistant{written('harmony', ('now', {}))}"
    assert read("harmony", text) == [Reasoning("Hm."), Text("I look."), Call(0, "now", "{}")]
    assert read("harmony", "<|channel|>final<|message|>Yes.\n") == [Text("Yes.\n")]
    assert read("harmony", "<|channel|>ana") == []


def test_two_messages_of_a_kind_are_two_lines() -> None:
    start = "<|end|><|start|>assistant"
    text = f"<|channel|>commentary<|message|>I look.{start}<|channel|>final<|message|>It rains.{start}"
    assert read("harmony", text) == [Text("I look.\nIt rains.")]
    text = f"<|channel|>analysis<|message|>Hm.{start}{written('harmony', ('now', {}))}{start}"
    events = read("harmony", f"{text}<|channel|>analysis<|message|>So.{start}<|channel|>final<|message|>Yes.")
    assert events == [Reasoning("Hm."), Call(0, "now", "{}"), Reasoning("\nSo."), Text("Yes.")]


def test_white_space_between_calls_is_of_no_text() -> None:
    text = written("hermes", ("now", {}), ("now", {}))
    assert text_of(read("hermes", f"\n{text}\n\nDone.")) == "Done."
    assert text_of(read("hermes", f"I look: \n{text}\n")) == "I look:"
    assert text_of(read("hermes", f"I look:{text}done.")) == "I look:\ndone."
    assert text_of(read("llama3", f"I look: {CALL}; {CALL} Done.")) == "I look:   Done."


# ---- however it comes


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "\n",
        " ",
        "<think>",
        "</think>",
        "Text",
        "[",
        "]",
        "{",
        "}",
        '"',
        "\\",
        ", ",
        ": ",
        ";",
    ),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "now", "functools", "<|tool_call|>", "<|/tool_call|>", CALL, NOW, "é"),
    *(
        "<|channel|>analysis",
        "<|channel|>commentary to=functions.now",
        "<|message|>",
        "<|end|>",
        "<|start|>",
        "<|call|>",
    ),
    *(written(name, ("weather", TOKYO), ("now", {})) for name in BY_NAME),
]


@FAST
@given(st.data())
def test_every_way_to_cut_a_text_says_the_same(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([None, *BY_NAME]))
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=8)))
    options: dict[str, Any] = data.draw(
        st.sampled_from([{}, {"thinks": True}, {"is_thinking": True}, {"dropped": ["<|end|>", "<|e"]}, {"most": 1}])
    )
    whole = read(name, text, **options)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    assert read(name, *(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)), **options) == whole
    assert read(name, *text, **options) == whole


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"harmony"}))
def test_text_is_told_as_soon_as_it_can_be_no_call(name: str) -> None:
    parser = AnswerParser(BY_NAME[name], NAMES)
    assert parser.push("Hello") == [Text("Hello")]
    assert parser.push(", you") == [Text(", you")]


def test_a_call_is_told_as_soon_as_it_is_whole() -> None:
    parser = AnswerParser(BY_NAME["hermes"], NAMES)
    assert parser.push(f"<tool_call>\n{CALL}") == [Call(0, "weather", '{"city": "A"}')]
    assert parser.push("\n</tool_call>") == parser.finish() == []
