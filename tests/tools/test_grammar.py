"""Answers that a grammar of calls lets a model write: those that the parser of the same format reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from nanoengine.core.errors import InvalidSamplingParams
from nanoengine.core.tokenizer import Tokenizer, read_tokenizer
from nanoengine.models.names import DEMO
from nanoengine.structured.grammars import Grammars
from nanoengine.structured.params import StructuredOutputs
from nanoengine.tools.formats import END_OF_THOUGHT, THINK
from nanoengine.tools.grammar import call_grammar
from nanoengine.tools.tool import choose, read_tools
from tests.drawn import FAST
from tests.tools.test_parser import BY_NAME, XML, calls_of, in_xml, read, text_of, written

EOS = 0
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PLACE, "strict": True}}
NOW = {"type": "function", "function": {"name": "now"}}
A: tuple[str, Any] = ("weather", {"city": "A"})
EMPTY: tuple[str, Any] = ("now", {})
WRONG = ("weather", {"town": "A"})
Accepts = Callable[..., bool]


@pytest.fixture(scope="module", params=["marks are text", "marks are tokens", "marks are special tokens"])
def grammars(request: pytest.FixtureRequest) -> Grammars:
    fast = read_tokenizer(DEMO).fast
    if request.param != "marks are text":
        marks = {mark for own in BY_NAME.values() for mark in own.marks if mark != "functools" and "=" not in mark}
        for mark in sorted({*marks, THINK, END_OF_THOUGHT}):
            (fast.add_special_tokens if "special" in request.param else fast.add_tokens)([AddedToken(mark)])
    return Grammars(Tokenizer(fast, "the demo's"), fast.get_vocab_size(with_added_tokens=True), [EOS])


@pytest.fixture
def accepts(grammars: Grammars) -> Accepts:
    """Whether an answer may be said and ended."""

    added = {token.content: number for number, token in grammars.tokenizer.fast.get_added_tokens_decoder().items()}

    def accept(
        name: str,
        text: str,
        choice: Any = "auto",
        most: int | None = None,
        tools: Any = (WEATHER, NOW),
        **options: bool,
    ) -> bool:
        if name == "harmony":
            text = text.removesuffix("<|call|>")  # an end of text of these models
        options = {"thinks": False, "is_thinking": False, **options}
        lark = call_grammar(
            BY_NAME[name], choose(read_tools(tools), choice, parallel=most is None), added.get, **options
        )
        tokens = [*grammars.tokenizer.encode(text, add_special_tokens=False), EOS]
        return grammars.matcher(StructuredOutputs(grammar=lark)).validate_tokens(tokens) == len(tokens)

    return accept


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
        assert not accepts(name, spelled(name, A, EMPTY), "required", most=1)
        assert accepts(name, one, "required", most=1)


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
        assert accepts(name, spelled(name, A), most=1)
        assert not accepts(name, text + spelled(name, WRONG))


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


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_accepted_is_read(accepts: Accepts, name: str) -> None:
    text = spelled(name, A)
    assert accepts(name, text)
    assert (calls_of(read(name, text)), text_of(read(name, text))) == ([A], "")


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


@pytest.mark.parametrize("kind", ["analysis", "commentary", "final"])
@pytest.mark.parametrize("is_written_out", [True, False])
def test_no_message_of_harmony_holds_another(grammars: Grammars, kind: str, is_written_out: bool) -> None:
    heads = [("<|channel|>", False), (kind, True), ("<|message|>", False)]
    wrong = [(mark, is_written_out) for mark in re.split("(<[^>]*>)", written("harmony", WRONG)) if mark]
    for before in ("<|call|>", "<|start|>", "<|return|>", "Hm."):
        text = walk(grammars, "harmony", [*heads, (before, is_written_out), *wrong], thinks=False, is_thinking=False)
        assert calls_of(read("harmony", text)) == []


PLAIN_TOKENIZER = Tokenizer(read_tokenizer(DEMO).fast, "the demo's")
MARKS = sorted({mark for own in BY_NAME.values() for mark in (*own.begins, *own.marks)} | {THINK, END_OF_THOUGHT})
BODIES = [
    *(
        json.dumps({"name": "weather", key: value})
        for key in ("arguments", "parameters")
        for value in ({"city": "A"}, {"town": 1})
    ),
    *(
        "weather",
        "{",
        "}",
        "[",
        "]",
        '{"city": "A"}',
        '{"town": "A"}',
        "assistant",
        "commentary to=functions.weather ",
        "analysis",
    ),
    *("final", "json", "\n", " ", ", ", "city", "town", "A", "<tool", "_call>", "x"),
    *(in_xml(name, "weather", value) for name in XML for value in ({"city": "A"}, {"town": "A"})),
]


@pytest.mark.parametrize("name", BY_NAME)
def test_no_mark_escapes_a_strict_tool(grammars: Grammars, name: str) -> None:
    called = 0

    @FAST
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal called
        own = [*BY_NAME[name].begins, *BY_NAME[name].marks] or ["{"]
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


# ---- values in XML

VALUES: list[tuple[Any, list[Any], list[str]]] = [
    ({"type": "string"}, ["", "a\n", " <b> {[", "null", "5"], []),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a\n\n"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^[a-c/]+$"}, ["abc", "a/b"], ["", "abd"]),
    ({"type": "string", "pattern": "b|c"}, ["abc", "c"], ["", "a"]),
    ({"enum": ["a", "b c", 1, None]}, ["a", "b c", 1, None], ["c", "2", ""]),
    ({"const": "a"}, ["a"], ["b"]),
    ({"type": "integer", "minimum": 3}, [3, 44], ["2", "3.5", "x"]),
    ({"type": "boolean"}, [True, False], ["1", "yes"]),
    (
        {"type": "array", "items": {"type": "string"}, "maxItems": 1},
        [[], ["a</b"]],
        ["[1]", "a", '["a", "b"]'],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
        [{"a": 1.5}],
        ["{}", '{"a": "b"}'],
    ),
    ({"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]}, ["ab", None], ["abcde"]),
    ({"type": ["string", "integer"], "maxLength": 2}, ["ab", 555], ["abc"]),
    ({"anyOf": [{"type": "integer", "minimum": 3}, {"type": "string"}]}, ["ab"], ["2"]),
    (
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
        ["ab", [1, 2], []],
        ['["a"]', "[", "[x"],
    ),
    ({"$ref": "#/$defs/one"}, ["a"], ["b"]),
    ({"type": "array", "items": {"$ref": "#/$defs/one"}}, [["a"]], ['["b"]']),
    ({"oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ["c"]),
    (True, ["a", 5, {}], []),
]


@pytest.mark.parametrize("name", XML)
@pytest.mark.parametrize(("schema", "right", "wrong"), VALUES, ids=str)
def test_values_in_xml_are_those_of_the_schema(
    accepts: Accepts, name: str, schema: Any, right: list[Any], wrong: list[str]
) -> None:
    whole = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": {"one": {"enum": ["a"]}}}
    tools = [{"type": "function", "function": {"name": "now", "parameters": whole}}]
    for value in right:
        text = written(name, ("now", {"a": value}))
        assert accepts(name, text, "required", tools=tools)
        assert calls_of(read(name, text, schemas={"now": whole})) == [("now", {"a": value})]
    for text in wrong:
        assert not accepts(name, written(name, ("now", {"a": text})), "required", tools=tools)
    assert not accepts(name, written(name, ("now", {})), "required", tools=tools)


@pytest.mark.parametrize("name", XML)
def test_arguments_in_xml_come_in_the_order_of_the_schema(accepts: Accepts, name: str) -> None:
    whole = {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": False}, "required": ["b", "d"]}
    tools = [
        {
            "type": "function",
            "function": {"name": "now", "parameters": whole | {"additionalProperties": {"type": "null"}}},
        }
    ]
    for value, is_right in (
        *[({"a": "x", "b": 1, "d": None}, True), ({"b": 1, "d": None}, True), ({"a": "x", "b": 1}, False)],
        *[({"b": 1, "a": "x", "d": None}, False), ({"b": 1, "d": 5}, False), ({"b": 1, "d": None, "e": None}, False)],
    ):
        assert accepts(name, written(name, ("now", value)), "required", tools=tools) == is_right


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        *[("minProperties", {"minProperties": 1}), ("anyOf", {"anyOf": [{"required": ["a"]}]})],
        *[
            ("format", {"properties": {"a": {"type": "string", "format": "date"}}}),
            ("not", {"properties": {"a": {"type": ["string", "null"], "not": {}}}}),
        ],
        *[("pattern", {"properties": {"a": {"type": "string", "pattern": own}}}) for own in ("^a|b$", "a(?=b)", "a^b")],
        *[
            ("oneOf", {"properties": {"a": {"oneOf": [{"type": "string"}, {"const": "a"}]}}}),
            ("required", {"properties": {"a": False}, "required": ["a"]}),
        ],
        ("$ref", {"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}),
        (
            "$ref",
            {
                "properties": {"a": {"$ref": "#/$defs/b"}},
                "$defs": {"b": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/b"}]}},
            },
        ),
    ],
    ids=str,
)
def test_what_xml_cannot_promise_is_refused(accepts: Accepts, keyword: str, schema: Any) -> None:
    tools = [{"type": "function", "function": {"name": "now", "parameters": schema}}]
    with pytest.raises(InvalidSamplingParams, match=f"parameters of now have {re.escape(keyword)}, which"):
        accepts("glm", "", "required", tools=tools)
