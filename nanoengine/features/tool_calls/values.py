"""Values without the quotes of JSON: the schema decides whether they are strings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoengine.features.tool_calls.json_text import loads
from nanoengine.features.tool_calls.python_calls import WORDS, literal_as_json

KINDS = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))

MAX_DEPTH = 64
"""Limit of the nesting of schemas."""

MAX_LOOKS = 20_000
"""Limit of the schemas and enumerated values of one answer or one grammar; each counts once for each reference to it."""


class Kinds:
    """The JSON types of values by their schemas. Each schema is visited once, and must live as long as this object.

    Attributes:
        left: the rest of `MAX_LOOKS`; below 0: a schema that was not visited allows all types.
    """

    def __init__(self) -> None:
        self.left = MAX_LOOKS
        self._known: dict[tuple[int, int], frozenset[str]] = {}  # by the ids of schema and root

    def of(self, schema: Any, root: Any) -> frozenset[str]:
        """The types of a value.

        Args:
            schema: of the value.
            root: the schema that its references refer to.
        """
        key = id(schema), id(root)
        if key not in self._known:
            self._known[key] = self._look(schema, root, {})
        return self._known[key]

    def _look(self, schema: Any, root: Any, known: dict[str, frozenset[str]], depth: int = 0) -> frozenset[str]:
        """As `of`. A client may send any value: one that is not a schema allows all types."""
        self.left -= 1
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH or self.left < 0:
            return frozenset() if schema is False else KINDS
        kinds = KINDS
        if "$ref" in schema:
            name = str(schema["$ref"])
            if name not in known:
                known[name] = frozenset()  # while it is looked at: it may refer to itself
                known[name] = self._look(resolved(name, root), root, known, depth + 1)
            kinds &= known[name]
        types = schema.get("type")
        named = KINDS & {kind for kind in (types if isinstance(types, list) else [types]) if isinstance(kind, str)}
        if named:
            kinds &= named | ({"integer"} if "number" in named else set())
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            self.left -= len(values)
            kinds &= {kind_of(value) for value in values}
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(keyword), list):
                each = [self._look(inner, root, known, depth + 1) for inner in schema[keyword]]
                kinds &= frozenset.intersection(KINDS, *each) if keyword == "allOf" else frozenset().union(*each)
        return kinds


def value_of(text: str, kinds: frozenset[str]) -> Any:
    """The value of a text of some JSON types: its JSON if that has one of these types, otherwise the text itself.
    Without the type string, JSON of any type is valid. A list or an object may also be in Python syntax.
    """
    if kinds == {"string"}:
        return text
    word = text.strip()
    try:
        value = loads(word if "string" in kinds else WORDS.get(word, word), strict=True)
    except (ValueError, RecursionError):
        value = _of_python(word) if kinds & {"array", "object"} and word[:1] in ("[", "{") else text
    return value if "string" not in kinds or (not isinstance(value, str) and kind_of(value) in kinds) else text


def _of_python(text: str) -> Any:
    """The list or object of a text in Python syntax, or the text itself."""
    try:
        return loads(literal_as_json(text), strict=True)
    except (ValueError, RecursionError):
        return text


def kind_of(value: Any) -> str:
    """The JSON type of a value; a number without a fraction is an integer."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def resolved(reference: Any, root: Any) -> Any:
    """The schema that a reference refers to; True, which allows any value, if it is not there."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    for name in reference.split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(root, Mapping) or key not in root:
            return True
        root = root[key]
    return root
