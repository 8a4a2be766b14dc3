"""Answers that a grammar of calls lets a model write: those that the parser of the same format reads."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.core.tokenizer import Tokenizer, read_tokenizer
from nanoengine.features.structured.grammars import Grammars
from nanoengine.features.structured.params import StructuredOutputs
from nanoengine.features.tool_calls.formats import END_OF_THOUGHT, THINK
from nanoengine.features.tool_calls.grammar import call_grammar
from nanoengine.features.tool_calls.rules import Rules
from nanoengine.features.tool_calls.stream_parser import Call
from nanoengine.features.tool_calls.tool import choose, read_tools
from nanoengine.models.names import DEMO
from tests.drawn import FAST
from tests.features.tool_calls.conftest import NOW, PLACE, WEATHER, Accepts
from tests.features.tool_calls.test_parser import BY_NAME, calls_of, in_xml, read, written

A: tuple[str, Any] = ("weather", {"city": "A"})
EMPTY: tuple[str, Any] = ("now", {})
NUMBERS = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
WRONG = ("weather", {"town": "A"})


def spelled(name: str, *calls: tuple[str, Any]) -> str:
    """As models write them, to the character: in front of a list there is no space."""
    return (
        written(name, *calls).replace("<|tool_call|> ", "<|tool_call|>").replace("}\n{", "}; {").replace("]\n[", "][")
    )


@pytest.mark.parametrize("name", BY_NAME)
def test_a_call_may_be_forced(accepts: Accepts, name: str) -> None:
    one = spelled(name, A)
    assert accepts(name, one, "required")
    assert accepts(name, spelled(name, EMPTY), "required")
    assert not accepts(name, spelled(name, WRONG), "required")
    assert not accepts(name, one[:-1] if name != "harmony" else one[:-10], "required")
    named = {"type": "function", "function": {"name": "now"}}
    assert accepts(name, spelled(name, EMPTY), named)
    assert not accepts(name, one, named)
    for text in ("", "Hello", "Hello " + one):
        assert not accepts(name, text, "required")
    if name != "harmony":
        assert accepts(name, spelled(name, A, EMPTY, A), "required")
        assert not accepts(name, spelled(name, A, EMPTY), "required", max_calls=1)
        assert accepts(name, one, "required", max_calls=1)
        for end in ("\n", "\n\n", " "):  # most models write one, and then their own end
            assert accepts(name, one + end, "required")
            assert accepts(name, one + end, "required", max_calls=1)
            assert not accepts(name, one + end + "Hello", "required")


@pytest.mark.parametrize("name", BY_NAME)
def test_otherwise_text_may_be_and_calls_are_right(accepts: Accepts, name: str) -> None:
    text = "Hello {you}, <b>.\n"
    if name == "harmony":
        text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{text}"
    assert accepts(name, text)
    assert accepts(name, spelled(name, A))
    assert not accepts(name, spelled(name, WRONG))
    if name not in ("harmony", "llama3", "json"):
        assert accepts(name, text + spelled(name, A) + text)
        assert accepts(name, spelled(name, A), max_calls=1)
        assert not accepts(name, text + spelled(name, WRONG))
    if name == "qwen3_coder":  # without the mark in front
        assert accepts(name, text + in_xml(*A) + text)
        assert not accepts(name, text + in_xml(*WRONG))


@pytest.mark.parametrize("name", BY_NAME)
def test_an_answer_is_calls_or_what_its_schema_says(accepts: Accepts, name: str) -> None:
    said = {"type": "object", "properties": {"sky": {"enum": ["red"]}}, "required": ["sky"]}
    before = "<|channel|>final<|message|>" if name == "harmony" else ""
    for tools in ((WEATHER, NOW), (NOW,)):  # with and without a tool that is strict
        assert accepts(name, before + '{"sky": "red"}', schema=said, tools=tools)
        assert not accepts(name, before + '{"sky": "blue"}', schema=said, tools=tools)
        assert not accepts(name, before + "Hello", schema=said, tools=tools)
        assert accepts(name, spelled(name, EMPTY), schema=said, tools=tools)
    assert not accepts(name, spelled(name, WRONG), schema=said)
    named = {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    assert accepts(name, before + '{"name": "Ada"}', schema=named), "it begins as a call does"
    assert accepts(name, spelled(name, A), schema=named)
    assert accepts(name, spelled(name, A), "required", schema=said), "there is no answer that it is of"
    assert not accepts(name, before + '{"sky": "red"}', "required", schema=said)


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"harmony"}))
def test_thoughts_are_free(accepts: Accepts, name: str) -> None:
    call = spelled(name, A)
    assert accepts(name, f"<think>\nHm {{.\n</think>\n\n{call}", "required", thinks=True)
    assert accepts(name, call, "required", thinks=True)
    assert not accepts(name, f"Hm.</think>{call}", "required", thinks=True)
    assert accepts(name, f"Hm.\n</think>{call}", "required", is_thinking=True)
    assert not accepts(name, call, "required", is_thinking=True)
    assert not accepts(name, "<think>Hm.</think>Hello", "required", thinks=True)
    assert accepts(name, "<think>Hm.</think>Hello", thinks=True)


def test_thoughts_of_harmony_are_free(accepts: Accepts) -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert accepts("harmony", thought + spelled("harmony", A), "required")
    assert not accepts("harmony", thought + "<|channel|>final<|message|>Yes.", "required")


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_numbers_beyond_floats_are_accepted_and_read(accepts: Accepts, name: str) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": NUMBERS, "strict": True}}
    for number in ("1e999", "9" * 5000):
        text = spelled(name, ("now", {"x": 0.25})).replace("0.25", number)
        assert accepts(name, text, "required", tools=[tool])
        whole = read(name, text, schemas={"now": NUMBERS})
        assert calls_of(whole) == [("now", {"x": float("inf")})]
        assert [own.arguments for own in whole if isinstance(own, Call)] == ['{"x": 1e999}']


def test_a_tool_that_is_not_strict_takes_any_object_unless_it_is_forced(accepts: Accepts) -> None:
    loose = [{"type": "function", "function": {"name": "weather", "parameters": PLACE}}]
    assert accepts("hermes", spelled("hermes", WRONG), tools=loose)
    assert not accepts("hermes", spelled("hermes", WRONG), "required", tools=loose)
    assert accepts("hermes", spelled("hermes", A), "required", tools=loose)


# ---- no mark escapes


def walk(
    grammars: Grammars, name: str, pieces: list[tuple[str, bool]], tools: Any = (WEATHER, NOW), **options: Any
) -> str:
    """What a model says that would say some pieces, with marks as tokens or written out, where it must not say another."""
    fast = grammars.tokenizer.fast
    added = {token.content: number for number, token in fast.get_added_tokens_decoder().items()}
    lark = call_grammar(BY_NAME[name], choose(read_tools(tools), options.pop("choice", "auto")), added.get, **options)
    matcher = grammars.matcher(StructuredOutputs(grammar=lark))
    said = []
    for text, is_written_out in pieces:
        encoder = PLAIN_TOKENIZER if is_written_out else grammars.tokenizer
        tokens = encoder.encode(text, add_special_tokens=False)
        if not matcher.is_stopped() and matcher.validate_tokens(tokens) == len(tokens):
            assert matcher.consume_tokens(tokens)
            said += tokens
    return fast.decode(said, skip_special_tokens=False)


PLAIN_TOKENIZER = Tokenizer(read_tokenizer(DEMO).fast, "the demo's")
MARKS = sorted({mark for own in BY_NAME.values() for mark in (*own.begins, *own.delimiters)} | {THINK, END_OF_THOUGHT})
BODIES = [
    *(
        json.dumps({"name": "weather", key: value})
        for key in ("arguments", "parameters")
        for value in ({"city": "A"}, {"town": 1})
    ),
    *("weather", "{", "}", "[", "]", '{"city": "A"}', '{"town": "A"}', "assistant", "analysis", "final", "json"),
    *("city", "town", "A", "<tool", "_call>", "x"),
    *("commentary to=functions.weather ", "\n", " ", ", "),
    *(in_xml("weather", value) for value in ({"city": "A"}, {"town": "A"})),
]


@pytest.mark.parametrize("name", BY_NAME)
def test_no_mark_escapes_a_strict_tool(grammars: Grammars, name: str) -> None:
    called = 0

    @FAST
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal called
        own = [*BY_NAME[name].begins, *BY_NAME[name].delimiters] or ["{"]
        part = st.sampled_from(MARKS) | st.sampled_from(own) | st.sampled_from(BODIES)
        pieces: list[tuple[str, bool]] = []
        for body in data.draw(st.lists(part | st.sampled_from([WRONG, A]), max_size=10)):
            texts = [body] if isinstance(body, str) else re.split("(<[^>]*>|\\[[A-Z_]+\\])", spelled(name, body))
            mark = data.draw(st.sampled_from(MARKS))
            is_written_out = data.draw(st.booleans())
            if name in ("granite", "phi") and not isinstance(body, str):  # either mark
                texts = [
                    data.draw(st.sampled_from(BY_NAME[name].begins)) if own in BY_NAME[name].begins else own
                    for own in texts
                ]
            pieces += [(text, is_written_out) for text in texts if text]
            if data.draw(st.integers(0, 3)) == 0:
                pieces.append((mark, data.draw(st.booleans())))
        thinks = data.draw(st.booleans()) and name != "harmony"
        text = walk(grammars, name, pieces, thinks=thinks, is_thinking=False)
        for tool, arguments in calls_of(read(name, text, thinks=thinks, schemas={"weather": PLACE})):
            assert tool == "now" or (arguments.keys() == {"city"} and isinstance(arguments["city"], str)), text
            called += tool == "weather"

    check()
    assert called  # otherwise this test shows nothing


def test_white_space_is_text_though_it_is_an_added_token() -> None:
    """As the line's end of Gemma 3: an id in its place broke answers whose next tokens were forced."""
    assert Rules({"<tool_call>": 5, "\n": 107}.get).say("<tool_call>", "\n", "{") == '<[5]> "\\n{"'
