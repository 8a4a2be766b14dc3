"""Normalized JSON schemas: equivalent or stricter keywords that llguidance enforces.

No schema becomes weaker: a keyword without an equivalent stays, and llguidance refuses it by name. But llguidance
reads each number as a float, and would write 9007199254740992 for the constant 9007199254740993: so that is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from math import inf, isfinite, nextafter
from typing import Any

from nanoengine.core.errors import InvalidSamplingParams, shown

JSON_OPTIONS = {"lenient": False, "coerce_one_of": False}
"""Options of llguidance: a schema cannot turn off the check of its keywords."""

ONE_SPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Options of llguidance: the default white space."""

OF_FIELD = " // of the field "
"""In a grammar, at the end of a line: the field of a request whose schema the line holds."""

MAX_CHARS = 1 << 19
"""Of a schema, an expression, a grammar, or all choices."""

ANNOTATIONS = frozenset(
    (
        *("path", "file-path", "directory-path", "password", "json-string"),
        *("binary", "byte", "base64", "base64url"),  # enforced groups of four would prevent the end
        *("text", "textarea", "multiline", "markdown", "html"),
        *("int32", "int64", "float", "double", "decimal"),  # of numbers; a schema may allow a string instead
    )
)
"""Formats that describe the use of a string and do not restrict it."""

HEX = "[0-9a-fA-F]"
PATTERNS = {f"uuid{n}": f"^{HEX}{{8}}-{HEX}{{4}}-{n}{HEX}{{3}}-[89abAB]{HEX}{{3}}-{HEX}{{12}}$" for n in range(1, 9)}
"""Of formats that llguidance does not know."""

NOTES = frozenset(("title", "description", "default", "examples", "deprecated"))
VALUES = frozenset(("enum", "const", "default", "examples", "x-guidance"))
"""Keywords that hold values, which may look like schemas."""

NAMED = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
"""Keywords that hold schemas by names, which may look like keywords."""

IN_PLACE = frozenset(("allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "not", "dependentSchemas"))
"""Keywords that hold schemas of the same value."""

OF_NAMES = frozenset(("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"))

INSIDE = {"minimum": inf, "exclusiveMinimum": inf, "maximum": -inf, "exclusiveMaximum": -inf}
"""Bounds, and where from them the numbers are that they allow."""

MAX_WHOLE, MAX_DIGITS, MAX_POWER = 1 << 63, 1 << 53, 22
"""Of numbers that are read right: a whole one, the digits of another, and their power of ten."""

KINDS = {"string": str, "integer": int, "boolean": bool, "null": type(None)}


def normalized_schema(schema: Any, field: str) -> Any:
    """An equivalent or stricter schema; the argument is not changed.

    An object with `properties` allows no others where `additionalProperties` is not stated, as in vLLM's xgrammar
    (`strict_mode`) and in llama.cpp: otherwise models write a name with a space too many. It stays open where other schemas
    describe the same object: beside `allOf`, `anyOf`, `$ref` and similar keywords, and in them.

    Args:
        field: of the request, for errors.

    Raises:
        InvalidSamplingParams: a number in the schema would change in llguidance's floats.
    """
    return _Schema(schema, field).normalize(schema)


class _Schema:
    def __init__(self, root: Any, field: str):
        self.root, self.field = root, field
        self.joined = _joined(root)

    def normalize(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.normalize(item) for item in schema]
        if not isinstance(schema, Mapping):
            return schema
        result: dict[str, Any] = {}
        for name, value in schema.items():
            if name in NAMED and isinstance(value, Mapping):
                result[name] = {key: self.normalize(inner) for key, inner in value.items()}
            elif name in INSIDE and type(value) in (int, float):
                result[name] = _within(value, INSIDE[name])
            else:
                result[name] = value if name in VALUES else self.normalize(value)
            if name in ("enum", "const"):
                self._check_numbers(name, value)
        if str(result.get("$ref")).startswith(("/$defs/", "/definitions/")):  # so litellm writes to Anthropic
            result["$ref"] = f"#{result['$ref']}"
        form = str(result.get("format"))
        if form in ANNOTATIONS:
            del result["format"]
        elif form in PATTERNS and "pattern" not in result:
            result["pattern"] = PATTERNS[result.pop("format")]
        elif form == "ipvanyaddress" and "anyOf" not in result:
            del result["format"]
            result["anyOf"] = [{"format": "ipv4"}, {"format": "ipv6"}]
        names = values_of(result.get("propertyNames"), self.root)
        is_alone = not result.keys() & {"properties", "patternProperties"}
        if names and is_alone and all(isinstance(name, str) for name in names):
            del result["propertyNames"]
            result["properties"] = dict.fromkeys(names, result.get("additionalProperties", True))
            result["additionalProperties"] = False
        if result.get("uniqueItems") is False or result.get("maxItems") in (0, 1):
            result.pop("uniqueItems", None)
        if result.get("minContains") == 0 and "maxContains" not in result:
            del result["minContains"]
            result.pop("contains", None)
        is_closed = not result.keys() & (IN_PLACE | OF_NAMES - {"properties", "patternProperties"})
        if is_closed and isinstance(result.get("properties"), dict) and id(schema) not in self.joined:
            required = result.get("required")
            for name in required if isinstance(required, list) else ():
                if isinstance(name, str):
                    result["properties"].setdefault(name, True)
            result["additionalProperties"] = False
        return result

    def _check_numbers(self, name: str, value: Any) -> None:
        """Raises InvalidSamplingParams if a number in a value may change in llguidance's floats."""
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        for item in inner:
            self._check_numbers(name, item)
        if _is_misread(value):
            instead = "use one of at most 15 digits, or a string"
            raise InvalidSamplingParams(
                self.field, f": {name} has the number {shown(value)}, which no grammar can hold: {instead}"
            )


def values_of(schema: Any, root: Any) -> list[Any] | None:
    """The distinct values of a schema; None if it allows others than listed strings, integers, booleans and null."""
    keywords = _keywords(schema)
    if keywords.keys() == {"$ref"}:
        keywords = _keywords(definition(keywords["$ref"], root))
    values = [False, True] if keywords == {"type": "boolean"} else keywords.get("enum", [keywords.get("const", ...)])
    is_plain = keywords.keys() <= {"enum", "const", "type"} and not keywords.keys() >= {"enum", "const"}
    kinds = KINDS.values() if "type" not in keywords else [KINDS.get(str(keywords["type"]))]
    if not is_plain or not isinstance(values, list) or any(type(value) not in kinds for value in values):
        return None
    return list({(type(value), value): value for value in values}.values())


def definition(reference: Any, root: Any) -> Any:
    """The definition that a reference names; None if it refers elsewhere."""
    table, _, name = str(reference).removeprefix("#").removeprefix("/").partition("/")
    if table not in ("$defs", "definitions") or not isinstance(root, Mapping):
        return None
    definitions = root.get(table)  # a client may send thousands, each of which refers to another: no copy
    return definitions.get(name) if isinstance(definitions, Mapping) else None


def _joined(root: Any) -> set[int]:
    """The ids of schemas whose object has more keywords in other schemas."""
    joined: set[int] = set()
    left = [(root, False)]
    while left:
        schema, is_joined = left.pop()
        if isinstance(schema, list):
            left += ((item, is_joined) for item in schema)
        if not isinstance(schema, Mapping) or (is_joined and id(schema) in joined):
            continue
        if is_joined:
            joined.add(id(schema))
        several = schema.get("allOf")
        is_one = len(schema.keys() & IN_PLACE) <= 1 and not schema.keys() & OF_NAMES
        below = is_joined or not is_one or (isinstance(several, list) and len(several) > 1)
        for name, value in schema.items():
            if name == "$ref":
                left += [(definition(value, root), True)] if below else []
            elif name in NAMED and isinstance(value, Mapping):
                left += ((item, name == "dependentSchemas") for item in value.values())
            elif name not in VALUES:
                left.append((value, below and name in IN_PLACE))
    return joined


def _within(bound: Any, inside: float) -> Any:
    """A bound, or the next float inside it where llguidance may read or compute another one."""
    if abs(bound) >= MAX_WHOLE:  # llguidance refuses such a bound, or computes it with 64 bits, which is stricter
        return bound
    return type(bound)(nextafter(bound, inside)) if abs(bound) >= MAX_DIGITS or _is_misread(bound) else bound


def _is_misread(number: Any) -> bool:
    """Whether llguidance may read another number: it multiplies the digits, as a float, by a power of ten."""
    if isinstance(number, float):
        if not isfinite(number):
            return True
        _, digits, exponent = Decimal(repr(number)).as_tuple()
        return int("".join(map(str, digits))) > MAX_DIGITS or abs(int(exponent)) > MAX_POWER
    return type(number) is int and (abs(number) >= MAX_WHOLE or int(float(number)) != number)


def _keywords(schema: Any) -> dict[str, Any]:
    """The keywords of a schema that restrict a value."""
    return {name: value for name, value in schema.items() if name not in NOTES} if isinstance(schema, Mapping) else {}
