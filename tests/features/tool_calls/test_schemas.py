"""Schemas of common types, as pydantic writes them: which are taken, which are refused by their keyword, and what is written."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from nanoengine.errors import InvalidSamplingParams
from nanoengine.features.structured.grammars import Grammars
from nanoengine.features.structured.params import StructuredOutputs
from nanoengine.features.tool_calls.json_grammar import MAX_ITEMS
from nanoengine.features.tool_calls.schemas import normalized_schema
from tests.features.structured.demo import accepts_all, demo_grammars

TYPES = json.loads((Path(__file__).parent / "pydantic_types.json").read_text())
"""Definitions of some classes; types of fields with values that are right or wrong; types that are refused."""


def whole(schema: dict[str, Any]) -> dict[str, Any]:
    """Of a model with one field of a type."""
    fields = {"properties": {"value": schema}, "required": ["value"]}
    return {"$defs": TYPES["definitions"], **fields, "title": "M", "type": "object"}


grammars = pytest.fixture(scope="module")(demo_grammars)


@pytest.mark.parametrize("name", TYPES["accepted"])
def test_common_types_are_taken(grammars: Grammars, name: str) -> None:
    own = TYPES["accepted"][name]
    matcher = grammars.matcher(StructuredOutputs(json=whole(own["schema"])))

    def accepted(value: Any) -> bool:
        return accepts_all(matcher, grammars.tokenizer, json.dumps({"value": value}, ensure_ascii=False))

    assert [value for value in own["right"] if not accepted(value)] == []
    assert [value for value in own["wrong"] if accepted(value)] == []


@pytest.mark.parametrize("name", TYPES["refused"])
def test_what_cannot_be_promised_is_refused_by_its_keyword(grammars: Grammars, name: str) -> None:
    own = TYPES["refused"][name]
    with pytest.raises(InvalidSamplingParams, match=rf"^structured_outputs\.json: .*{own['words']}"):
        grammars.matcher(StructuredOutputs(json=whole(own["schema"])))


@pytest.mark.parametrize("spaces", [{}, {"disable_any_whitespace": False}, {"whitespace_pattern": " "}])
@pytest.mark.parametrize("is_open", [False, True])
def test_properties_come_in_any_order_each_once(grammars: Grammars, is_open: bool, spaces: dict[str, Any]) -> None:
    rng = random.Random(is_open)
    separators = (", ", ": ") if not spaces else (" , ", " : ")
    for count in (2, 7, MAX_ITEMS):
        names = [f"{rng.choice(['a', 'a b', 'é', '/'])}{number}" for number in range(count)]
        required = rng.sample(names, count // 2)
        schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": required}
        matcher = grammars.matcher(
            StructuredOutputs(json=schema | ({"additionalProperties": True} if is_open else {}), **spaces)
        )

        def written(members: list[str]) -> str:
            return separators[0].join(f"{json.dumps(name, ensure_ascii=False)}{separators[1]}1" for name in members)

        def accepted(members: list[str], matcher: LLMatcher = matcher) -> bool:
            return accepts_all(matcher, grammars.tokenizer, f"{{{written(members)}}}")

        tokens = grammars.tokenizer.encode(f"{{{written(names)}{separators[0]}")
        assert (matcher.validate_tokens(tokens) == len(tokens)) == is_open, "no way leads on"
        for _ in range(5):
            members = [name for name in names if name in required or rng.random() < 0.5]
            rng.shuffle(members)
            assert accepted(members)
            assert accepted([*members, "z", "z"]) == is_open
            assert not accepted([*members, rng.choice(members)])
            assert not accepted([name for name in members if name != required[0]])


def test_a_number_beyond_floats_is_refused_as_a_constant() -> None:
    """The JSON of tools may have one."""
    with pytest.raises(InvalidSamplingParams, match=r"^tools: const has the number inf, which no grammar can hold"):
        normalized_schema({"const": math.inf}, "tools")


def test_a_schema_is_not_changed_and_references_are_followed_once() -> None:
    schema = {**whole(TYPES["accepted"]["dataclass"]["schema"]), "allOf": [{"$ref": "#/$defs/Tree"}] * 2}
    before = json.dumps(schema)
    assert "additionalProperties" not in normalized_schema(schema, "")["$defs"]["Tree"]
    assert normalized_schema(schema, "")["$defs"]["Record"]["additionalProperties"] is False
    assert json.dumps(schema) == before
    chain = {f"p{i}": {"allOf": [{"$ref": f"#/$defs/p{(i + 1) % 5000}"}, {}]} for i in range(5000)}
    assert normalized_schema({"$defs": chain, "$ref": "#/$defs/p0"}, "") == {"$defs": chain, "$ref": "#/$defs/p0"}
