"""Schemas of common types, as pydantic writes them: which are taken, which are refused by their keyword, and what is written."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher

from nanoengine.core.tokenizer import read_tokenizer
from nanoengine.errors import InvalidSamplingParams
from nanoengine.features.structured.grammars import Grammars
from nanoengine.features.structured.params import StructuredOutputs
from nanoengine.features.tool_calls.json_grammar import MAX_ITEMS
from nanoengine.features.tool_calls.schemas import normalized_schema
from nanoengine.models.names import DEMO

EOS = 0
COLOUR = {"enum": ["red", "blue"], "title": "Colour", "type": "string"}
DOG = {"properties": {"kind": {"const": "dog", "type": "string"}}, "required": ["kind"], "type": "object"}
CAT = {"properties": {"kind": {"const": "cat", "type": "string"}}, "required": ["kind"], "type": "object"}
BOTH = {"oneOf": [{"$ref": "#/$defs/Dog"}, {"$ref": "#/$defs/Cat"}], "discriminator": {"propertyName": "kind"}}
TREE = {"properties": {"own": {"type": "integer"}, "more": {"items": {"$ref": "#/$defs/Tree"}, "type": "array"}}} | {
    "type": "object"
}
PAIR = {"maxItems": 2, "minItems": 2, "prefixItems": [{"type": "integer"}, {"type": "string"}], "type": "array"}
POINT = {"maxItems": 2, "minItems": 1, "prefixItems": [{"type": "integer"}, {"default": 0, "type": "integer"}]}
RECORD = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"], "type": "object"}
DEFS = {"Colour": COLOUR, "Dog": DOG, "Cat": CAT, "Tree": TREE, "Point": POINT | {"type": "array"}, "Record": RECORD}
JSON_TEXT = {"contentMediaType": "application/json", "contentSchema": {}, "type": "string"}
DIFFERENT = {"type": "array", "uniqueItems": True}
UUID = "ad8f1a1c-3b1e-{}b1e-9b1e-ad8f1a1c3b1e"


def string(format: str) -> dict[str, Any]:
    return {"format": format, "type": "string"}


TAKEN: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "date": (string("date"), ["2024-02-29"], ["today"]),
    "UUID": (string("uuid"), [UUID.format(1)], ["a"]),
    "UUID4": (string("uuid4"), [UUID.format(4)], [UUID.format(1)]),
    "EmailStr": (string("email"), ["a@example.com"], ["a"]),
    "HttpUrl": ({**string("uri"), "maxLength": 2083, "minLength": 1}, ["http://a.org/"], ["a b"]),
    "IPvAnyAddress": (string("ipvanyaddress"), ["10.0.0.1", "::1"], ["localhost"]),
    "Path": (string("path"), ["/a b"], [1]),
    "SecretStr": ({**string("password"), "writeOnly": True}, ["a"], [1]),
    "bytes": (string("binary"), ["a"], [1]),
    "Base64Bytes": (string("base64"), ["YQ=="], [1]),
    "Json": (JSON_TEXT, ["{}"], [{}]),
    "set[Literal]": ({**DIFFERENT, "items": {"enum": ["a", 1]}}, [[], ["a"], [1, "a"], ["a", 1]], [["a", "a"], ["b"]]),
    "frozenset[Enum]": ({**DIFFERENT, "items": {"$ref": "#/$defs/Colour"}}, [["blue", "red"]], [["red", "red"]]),
    "set[bool]": ({**DIFFERENT, "items": {"type": "boolean"}, "minItems": 1}, [[True, False]], [[], [True, True]]),
    "set[Enum], two of many": (
        {**DIFFERENT, "items": {"enum": [*"abcdefghij"]}, "maxItems": 2},
        [["j", "c"], ["j"]],
        [["j", "j"], ["a", "b", "c"]],
    ),
    "set[Enum] of many": ({**DIFFERENT, "items": {"enum": [*range(40)]}}, [[*range(39, -1, -1)]], [[1, 11, 1], [40]]),
    "contains": (
        {"type": "array", "items": {"type": "integer"}, "contains": {"const": 5}, "minItems": 2, "maxItems": 3},
        [[5, 1], [1, 2, 5], [5, 5, 5]],
        [[5], [1, 2], [1, 2, 3], [1, 2, 3, 5], ["a", 5]],
    ),
    "contains none": (
        {"type": "array", "items": {"enum": [1]}, "contains": {"const": 5}, "minContains": 0},
        [[1]],
        [[5]],
    ),
    "set[int], one": ({**DIFFERENT, "items": {"type": "integer"}, "maxItems": 1}, [[7]], [[1, 2]]),
    "list[int]": ({"items": {"type": "integer"}, "type": "array", "uniqueItems": False}, [[1, 1]], [["a"]]),
    "tuple[int, str]": (PAIR, [[1, "a"]], [[1], ["a", 1]]),
    "dict[Enum, int]": (
        {"additionalProperties": {"type": "integer"}, "propertyNames": {"$ref": "#/$defs/Colour"}, "type": "object"},
        [{}, {"red": 1}, {"red": 1, "blue": 2}],
        [{"green": 1}, {"red": "a"}],
    ),
    "discriminated": (BOTH, [{"kind": "cat"}], [{"kind": "cow"}]),
    "Enum": ({"$ref": "#/$defs/Colour"}, ["red"], ["green"]),
    "Enum, as litellm refers to it": ({"$ref": "/$defs/Colour"}, ["red"], ["green"]),
    "set[Enum], so": ({**DIFFERENT, "items": {"$ref": "/$defs/Colour"}}, [["red"]], [["red", "red"]]),
    "recursive": ({"$ref": "#/$defs/Tree"}, [{"own": 1, "more": [{"own": 2}]}], [{"more": [1]}]),
    "NamedTuple": ({"$ref": "#/$defs/Point"}, [[1], [1, 2]], [[], [1, 2, 3]]),
    "dataclass": ({"$ref": "#/$defs/Record"}, [{"a": 1}, {"b": "a", "a": 1}], [{"b": "a"}, {"a": 1, "b ": "a"}]),
    "two dataclasses": (
        {"allOf": [{"$ref": "#/$defs/Record"}, {"properties": {"c": {"type": "null"}}, "required": ["c"]}]},
        [{"a": 1, "c": None}],
        [{"a": 1}, {"c": None}],
    ),
    "extra": ({**RECORD, "additionalProperties": True}, [{"c": [], "b": "a", "a": 1}], [{"c": 1}, {"a": 1, "b": 2}]),
    "asked for": ({**RECORD, "required": ["c"]}, [{"b": "a", "c": {}}], [{"b": "a"}, {"c": 1, "d": 1}]),
    "Optional": (
        {"anyOf": [{"items": {"$ref": "#/$defs/Record"}, "maxItems": 2, "type": "array"}, {"type": "null"}]},
        [None, [], [{"b": "a", "a": 1}, {"a": 2}]],
        [[{}], [{"a": 1}, {"a": 1}, {"a": 1}]],
    ),
    "nothing fits": ({"properties": {"a": {"enum": []}, "b": {"const": 1}}, "type": "object"}, [{"b": 1}], [{"a": 1}]),
    # Of 64 bits, where floats are 2 and more apart.
    "int64": ({"type": "integer", "maximum": (1 << 63) - 6}, [1 << 62], [(1 << 63) - 5, (1 << 63) - 1]),
    "id": (
        {"type": "integer", "minimum": (1 << 53) + 1, "maximum": (1 << 53) + 5},
        [(1 << 53) + 2],
        [1 << 53, (1 << 53) + 6],
    ),
    "gt and lt": (
        {"type": "integer", "exclusiveMinimum": 1 << 53, "exclusiveMaximum": (1 << 53) + 6},
        [(1 << 53) + 4],
        [1 << 53, (1 << 53) + 6],
    ),
    # A property may be called as a keyword, and a value may look like a schema.
    "names": (
        {"properties": {"format": {"const": {"format": "path"}}}, "type": "object"},
        [{"format": {"format": "path"}}],
        [],
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "set[int]": ({**DIFFERENT, "items": {"type": "integer"}}, '"uniqueItems".: it can be where items is an enum'),
    "set of many": ({**DIFFERENT, "items": {"enum": list(range(MAX_ITEMS + 1))}}, "uniqueItems.*at most 64 values"),
    "contains of many": ({"type": "array", "contains": {"const": 5}, "maxItems": 1000}, "contains.*up to 100"),
    "overlapping patterns": (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": {"type": "string"}}},
        "/\\^a/ and /b\\$/ are not disjoint: a name that fits both",
    ),
    "set of what is equal": ({**DIFFERENT, "items": {"enum": [1, 1.0]}}, "uniqueItems"),
    "set of at most 2.0": ({**DIFFERENT, "items": {"enum": ["a", "b", "c"]}, "maxItems": 2.0}, "uniqueItems"),
    "set of fewer than none": ({**DIFFERENT, "items": {"enum": ["a", "b"]}, "maxItems": -3}, "maxItems|uniqueItems"),
    "dict[date, int]": ({"type": "object", "propertyNames": {"format": "date"}}, "propertyNames"),
    "Literal of 64 bits": (
        {"enum": ["a", {"b": [(1 << 53) + 1]}]},
        "enum has the number 9007199254740993, which no grammar",
    ),
    "Literal of 17 digits": (
        {"const": 123456789.12345679},
        "const has the number 123456789.12345679, which no grammar",
    ),
    "Pattern": (string("regex"), "Unknown format: regex"),
}


def whole(schema: dict[str, Any]) -> dict[str, Any]:
    """Of a model with one field of a type."""
    return {"$defs": DEFS, "properties": {"value": schema}, "required": ["value"], "title": "M", "type": "object"}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = read_tokenizer(DEMO)
    return Grammars(tokenizer, tokenizer.fast.get_vocab_size(), [EOS])


@pytest.mark.parametrize("name", TAKEN)
def test_common_types_are_taken(grammars: Grammars, name: str) -> None:
    schema, right, wrong = TAKEN[name]
    matcher = grammars.matcher(StructuredOutputs(json=whole(schema)))

    def accepted(value: Any) -> bool:
        tokens = [*grammars.tokenizer.encode(json.dumps({"value": value}, ensure_ascii=False)), EOS]
        return matcher.deep_copy().validate_tokens(tokens) == len(tokens)

    assert [value for value in right if not accepted(value)] == []
    assert [value for value in wrong if accepted(value)] == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_promised_is_refused_by_its_keyword(grammars: Grammars, name: str) -> None:
    schema, words = REFUSED[name]
    with pytest.raises(InvalidSamplingParams, match=rf"^structured_outputs\.json: .*{words}"):
        grammars.matcher(StructuredOutputs(json=whole(schema)))


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

        def accepted(members: list[str], matcher: LLMatcher = matcher) -> bool:
            text = separators[0].join(f"{json.dumps(name, ensure_ascii=False)}{separators[1]}1" for name in members)
            tokens = [*grammars.tokenizer.encode(f"{{{text}}}"), EOS]
            return matcher.deep_copy().validate_tokens(tokens) == len(tokens)

        begun = separators[0].join(f"{json.dumps(name, ensure_ascii=False)}{separators[1]}1" for name in names)
        tokens = grammars.tokenizer.encode(f"{{{begun}{separators[0]}")
        assert (matcher.deep_copy().validate_tokens(tokens) == len(tokens)) == is_open, "no way leads on"
        for _ in range(5):
            members = [name for name in names if name in required or rng.random() < 0.5]
            rng.shuffle(members)
            assert accepted(members)
            assert accepted([*members, "z", "z"]) == is_open
            assert not accepted([*members, rng.choice(members)])
            assert not accepted([name for name in members if name != required[0]])


def test_a_schema_is_not_changed_and_references_are_followed_once() -> None:
    schema = {**whole(TAKEN["dataclass"][0]), "allOf": [{"$ref": "#/$defs/Tree"}] * 2}
    before = json.dumps(schema)
    assert "additionalProperties" not in normalized_schema(schema, "")["$defs"]["Tree"]
    assert normalized_schema(schema, "")["$defs"]["Record"]["additionalProperties"] is False
    assert json.dumps(schema) == before
    chain = {f"p{i}": {"allOf": [{"$ref": f"#/$defs/p{(i + 1) % 5000}"}, {}]} for i in range(5000)}
    assert normalized_schema({"$defs": chain, "$ref": "#/$defs/p0"}, "") == {"$defs": chain, "$ref": "#/$defs/p0"}
