"""Calls in XML: their values are what the schema says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.features.tool_calls.test_parser import calls_of, read

PROPERTIES = {
    "text": {"type": "string"},
    "number": {"type": "number"},
    "flag": {"type": "boolean"},
    "list": {"type": "array", "items": {"type": "string"}},
    "table": {"$ref": "#/$defs/table"},
    "perhaps": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "code": {"enum": [1, "a"]},
    "any": {},
}


SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"table": {"type": "object"}}}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        *[("text", own, own) for own in ("5", "null", " a \n", '"a"', '{"a": 1}', "<b> </b", "")],
        *[("number", "5", 5), ("number", "5.5", 5.5), ("number", "many", "many"), ("number", "1e999", float("inf"))],
        *[("flag", "true", True), ("flag", "True", True), ("flag", "None", None), ("number", "NaN", "NaN")],
        *[("list", '["a", "</arg_value></parameter>"]', ["a", "</arg_value></parameter>"]), ("list", "[1", "[1")],
        *[("list", "['a', True, None]", ["a", True, None]), ("list", "['a'", "['a'"), ("perhaps", "['a']", "['a']")],
        *[("table", '{\'a\': "it\'s", "b": [-1.5]}', {"a": "it's", "b": [-1.5]}), ("any", "['a']", ["a"])],
        *[
            ("list", "now(a=[1])", "now(a=[1])"),
            ("list", "[now(a=[1])]", "[now(a=[1])]"),
            ("table", ' {"a": "}\\""}', {"a": '}"'}),
            ("table", "[" * 9999, "[" * 9999),
        ],
        *[("perhaps", "null", None), ("perhaps", "5", "5"), ("perhaps", "True", "True"), ("code", "1", 1)],
        *[("code", "a", "a"), ("any", "5", 5), ("any", "a b", "a b"), ("other", "[]", [])],
    ],
)
def test_values_are_what_the_schema_says(key: str, text: str, value: Any) -> None:
    before = f"<tool_call><function=now><parameter={key}>\n"
    behind = "\n</parameter></function></tool_call>"
    whole = read("qwen3_coder", before + text + behind, schemas={"now": SCHEMA})
    assert calls_of(whole) == [("now", {key: value})]
    assert read("qwen3_coder", *(before + text + behind), schemas={"now": SCHEMA}) == whole
