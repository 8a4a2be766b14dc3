"""Schemas of common types, as pydantic writes them: which are taken, which are refused by their keyword, and what is written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanoengine.core.tokenizer import read_tokenizer
from nanoengine.errors import InvalidSamplingParams
from nanoengine.features.structured.grammars import Grammars
from nanoengine.features.structured.params import StructuredOutputs
from nanoengine.models.names import DEMO
from nanoengine.models.tools.schemas import MAX_ORDER_CHARS, MAX_ORDERS, promised

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
    "dataclass": ({"$ref": "#/$defs/Record"}, [{"a": 1}], [{"b": "a"}]),
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
    "set of many": ({**DIFFERENT, "items": {"enum": list(range(6))}}, "uniqueItems"),
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


def test_a_schema_is_not_changed_and_orders_are_bounded() -> None:
    before = json.dumps(TAKEN["set[Literal]"][0])
    found = promised(TAKEN["set[Literal]"][0], "")
    assert json.dumps(TAKEN["set[Literal]"][0]) == before
    assert len(found["anyOf"]) == 2
    many = {**DIFFERENT, "items": {"enum": list(range(MAX_ORDERS))}, "maxItems": 2}
    assert promised(many, "") == many
    lists = promised({"prefixItems": [{**DIFFERENT, "items": {"enum": [*"abcde"]}} for _ in range(2000)]}, "")
    assert len(json.dumps(lists)) < 4 * MAX_ORDER_CHARS
