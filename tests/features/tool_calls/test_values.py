"""Of which kinds a value may be, and what a text is where it may be several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from nanoengine.features.tool_calls.json_text import dumps, loads
from nanoengine.features.tool_calls.values import KINDS, Kinds, kind_of, value_of
from tests.drawn import FAST

SCHEMAS = json.loads((Path(__file__).parent / "xml_schemas.json").read_text())
"""Schemas of a value, with values that are right, texts that are wrong, or types; schemas of arguments that are refused."""

ROOT = {
    "$defs": {"a": {"type": "null"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"const": 5}]}, "b/c": {"const": "x"}}
}


@pytest.mark.parametrize("case", SCHEMAS["types"], ids=str)
def test_a_schema_says_of_which_kinds_a_value_is(case: dict[str, Any]) -> None:
    assert Kinds().of(case["schema"], ROOT) == (KINDS if case["types"] == "any" else set(case["types"]))


def test_schemas_in_each_other_have_an_end() -> None:
    schema: Any = {"type": "string"}
    for _ in range(100_000):
        schema = {"anyOf": [schema]}
    assert Kinds().of(schema, ROOT) == KINDS
    names = {str(i): {"anyOf": [{"$ref": f"#/{i + 1}"}] * 2} for i in range(30)}  # 2**30 ways to the last
    assert Kinds().of({"$ref": "#/0"}, names | {"30": {"type": "null"}}) == {"null"}


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats()
    | st.sampled_from(["string", "a", "#/$defs/a", "^a|b$"]),
    lambda own: st.lists(own, max_size=3) | st.dictionaries(st.text(max_size=2), own, max_size=3),
    max_leaves=5,
)
KEYWORDS = ["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "properties", "required"]
KEYWORDS += ["additionalProperties", "minLength", "maxLength", "pattern", "format", "items", "not", "description"]


def schemas() -> st.SearchStrategy[Any]:
    """What clients may send as one: right or not."""
    kinds = st.sampled_from(sorted(KINDS))
    right = st.fixed_dictionaries({"type": kinds | st.lists(kinds, max_size=2)})
    return st.recursive(
        ANY | right,
        lambda own: (
            st.dictionaries(st.sampled_from(KEYWORDS), own | st.lists(own, max_size=2) | ANY, max_size=4)
            | st.fixed_dictionaries({"properties": st.dictionaries(st.sampled_from("ab"), own)})
        ),
        max_leaves=8,
    )


@FAST
@given(schemas(), st.text(max_size=5) | ANY.map(json.dumps))
def test_whatever_the_schema_a_text_has_a_value(schema: Any, text: str) -> None:
    kinds = Kinds().of(schema, schema)
    assert kinds <= KINDS
    value = value_of(text, kinds)
    assert value == text or loads(dumps(value)) == value


@FAST
@given(st.data())
def test_a_value_that_is_written_is_read(data: st.DataObject) -> None:
    """A string as it is, all else as JSON; where that is the same text, it is the one that may be."""
    kinds = data.draw(st.sets(st.sampled_from(sorted(KINDS)), min_size=1))
    value = data.draw(ANY.filter(lambda own: own == own and abs(own if isinstance(own, float) else 0) < 1e300))
    schema = {"anyOf": [{"type": kind} for kind in sorted(kinds)]}
    text = value if isinstance(value, str) else json.dumps(value)
    if "NaN" not in text and "Infinity" not in text and Draft202012Validator(schema).is_valid(value):
        assert value_of(text, Kinds().of(schema, schema)) == value
        assert kind_of(value) in kinds or kind_of(value) == "integer"
