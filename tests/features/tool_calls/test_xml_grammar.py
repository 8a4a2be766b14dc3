"""What a grammar lets a model write as a call in XML, and what it cannot promise."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given

from nanoengine.core.errors import InvalidSamplingParams
from nanoengine.features.tool_calls.grammar import call_grammar
from nanoengine.features.tool_calls.schemas import MAX_CHARS
from nanoengine.features.tool_calls.tool import choose, read_tools
from nanoengine.features.tool_calls.values import MAX_LOOKS
from tests.drawn import FAST
from tests.features.tool_calls.conftest import Accepts
from tests.features.tool_calls.test_parser import BY_NAME, calls_of, read, written
from tests.features.tool_calls.test_values import SCHEMAS, schemas


def tools_of(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "now", "parameters": parameters}}]


@pytest.mark.parametrize("case", SCHEMAS["values"], ids=lambda case: str(case["schema"]))
def test_values_in_xml_are_those_of_the_schema(accepts: Accepts, case: dict[str, Any]) -> None:
    whole = {
        "type": "object",
        "properties": {"a": case["schema"]},
        "required": ["a"],
        "$defs": {"one": {"enum": ["a"]}},
    }
    tools = tools_of(whole)
    for value in case["right"]:
        text = written("qwen3_coder", ("now", {"a": value}))
        assert accepts("qwen3_coder", text, "required", tools=tools)
        assert calls_of(read("qwen3_coder", text, schemas={"now": whole})) == [("now", {"a": value})]
    for text in case["wrong"]:
        assert not accepts("qwen3_coder", written("qwen3_coder", ("now", {"a": text})), "required", tools=tools)
    assert not accepts("qwen3_coder", written("qwen3_coder", ("now", {})), "required", tools=tools)


def test_arguments_in_xml_come_in_any_order(accepts: Accepts) -> None:
    whole = {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": False}, "required": ["b", "d"]}
    tools = tools_of(whole | {"additionalProperties": {"type": "null"}})
    for value, is_right in (
        ({"a": "x", "b": 1, "d": None}, True),
        ({"b": 1, "d": None}, True),
        ({"d": None, "b": 1, "a": "x"}, True),
        ({"b": 1, "a": "x"}, False),
        ({"b": 1, "d": 5}, False),
        ({"b": 1, "d": None, "e": None}, False),
    ):
        assert accepts("qwen3_coder", written("qwen3_coder", ("now", value)), "required", tools=tools) == is_right


@pytest.mark.parametrize("case", SCHEMAS["refused"], ids=str)
def test_what_xml_cannot_promise_is_refused(accepts: Accepts, case: dict[str, Any]) -> None:
    words = f"parameters of now have {re.escape(case['keyword'])}, which"
    with pytest.raises(InvalidSamplingParams, match=words):
        accepts("qwen3_coder", "", "required", tools=tools_of(case["schema"]))


@FAST
@given(schemas())
def test_any_schema_has_a_grammar_or_is_refused(schema: Any) -> None:
    """Whatever a client sends, nothing else is raised."""
    tools = read_tools(tools_of(schema if isinstance(schema, dict) else {"a": schema}))
    with suppress(InvalidSamplingParams):
        text = call_grammar(BY_NAME["qwen3_coder"], choose(tools, "required"), {}.get, thinks=False, is_thinking=False)
        assert text.startswith("%llguidance")


def refers(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


def levels(size: int, last: Any) -> dict[str, Any]:
    """Three levels, each of which refers to the next as often as that."""
    names = {f"l{level}": {"anyOf": [refers(f"l{level + 1}")] * (size // 8)} for level in range(3)}
    return {"properties": {"a": refers("l0")}, "$defs": names | {"l3": last}}


def properties(size: int, schema: Any, **defs: Any) -> dict[str, Any]:
    return {"properties": {f"p{number}": schema for number in range(size)}, "$defs": defs}


def nested(size: int, link: Callable[[Any], Any]) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(size % 20 + 5):
        schema = link(schema)
    return {"properties": {"a": schema}}


GROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "depth of anyOf": lambda size: nested(size, lambda own: {"anyOf": [own]}),
    "breadth": lambda size: properties(size, {"type": ["string", "integer", "object"]}),
    "references to references": lambda size: levels(size, {"type": "string"}),
    "references to nothing": lambda size: levels(size, {"anyOf": []}),
    "what many refer to": lambda size: properties(size, refers("d"), d={"anyOf": [{"type": "string"}] * size}),
    "enumerations that many refer to": lambda size: properties(
        size, refers("d"), d={"enum": list(map(str, range(size)))}
    ),
    "definitions": lambda size: properties(
        size, {"type": "array"}, **{f"d{number}": {"type": "null"} for number in range(size)}
    ),
    "tables": lambda size: {"properties": {"a": {"anyOf": [{"type": "string"}, *[{"type": "array"}] * size]}}},
}


def calls_in(function: Callable[[], object]) -> int:
    """How many functions were called, those of C among them."""
    count = 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("direction", GROWS)
def test_however_a_schema_grows_the_work_for_it_is_bounded(direction: str) -> None:
    rng = random.Random(direction)
    own = [GROWS[name](rng.randrange(300, 500)) for name in (direction, rng.choice(list(GROWS)))]
    tools = [
        {"function": {"name": f"f{place}", "parameters": table, "strict": True}} for place, table in enumerate(own)
    ]
    text = ""

    def make() -> None:
        nonlocal text
        with suppress(InvalidSamplingParams):
            choice = choose(read_tools(tools), "required")
            text = call_grammar(BY_NAME["qwen3_coder"], choice, lambda _: None, thinks=False, is_thinking=False)

    assert calls_in(make) < 2 * len(json.dumps(own)) + 30 * MAX_LOOKS
    assert len(text) < 6 * MAX_CHARS


def test_a_model_that_repeats_a_key_does_not_have_its_schema_read_again() -> None:
    schema = properties(1, refers("d"), d={"anyOf": [{"type": "string"}] * 3000})
    text = written("qwen3_coder", ("now", {f"p{number % 2}": "x" for number in range(2)})).replace(
        "</function>", "<parameter=p0>x</parameter>" * 300 + "</function>"
    )
    assert calls_in(lambda: read("qwen3_coder", text * 3, schemas={"now": schema})) < 100 * 3000
    assert calls_of(read("qwen3_coder", text, schemas={"now": schema})) == [("now", {"p0": "x", "p1": "x"})]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "[" * 16_000}}}, "have pattern, which"),
        (levels(800, {"type": "string"}), f"more than {MAX_LOOKS} schemas and values of enum"),
        (properties(1000, {"type": "array"}, d={"title": "d" * 1000}), f"schemas .* more than {MAX_CHARS} characters"),
    ],
    ids=["pattern", "references", "definitions"],
)
def test_what_is_too_large_for_xml_is_refused_by_name(accepts: Accepts, schema: Any, words: str) -> None:
    with pytest.raises(InvalidSamplingParams, match=f"^tools.*{words}"):
        accepts("qwen3_coder", "", "required", tools=tools_of(schema))
