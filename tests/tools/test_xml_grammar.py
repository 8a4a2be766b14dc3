"""What a grammar lets a model write as a call in XML, and what it cannot promise."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given

from nanoengine.core.errors import InvalidSamplingParams
from nanoengine.tools.formats import FORMATS
from nanoengine.tools.grammar import call_grammar
from nanoengine.tools.tool import choose, read_tools
from tests.drawn import FAST
from tests.tools.conftest import Accepts
from tests.tools.test_parser import XML, calls_of, read, written
from tests.tools.test_values import schemas

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


@FAST
@given(schemas())
def test_any_schema_has_a_grammar_or_is_refused(schema: Any) -> None:
    """Whatever a client sends, nothing else is raised."""
    tools = read_tools(
        [{"function": {"name": "now", "parameters": schema if isinstance(schema, dict) else {"a": schema}}}]
    )
    glm = next(own for own in FORMATS if own.name == "glm")
    with suppress(InvalidSamplingParams):
        text = call_grammar(glm, choose(tools, "required"), {}.get, thinks=False, is_thinking=False)
        assert text.startswith("%llguidance")
