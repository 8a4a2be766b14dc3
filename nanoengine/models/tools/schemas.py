"""Schemas in words that llguidance can promise: formats that ask for nothing, lists whose items differ, names of properties.

No schema is made weaker: what cannot be said in other words stays as it is, and llguidance refuses it by its keyword. But it
reads each number as a float, and would write 9007199254740992 for the constant 9007199254740993: so that is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from itertools import permutations
from math import inf, nextafter, perm
from typing import Any

from nanoengine.core.errors import InvalidSamplingParams, shown

JSON_OPTIONS = {"lenient": False, "coerce_one_of": False}
"""Of llguidance: a schema cannot have its own keywords ignored."""

ONE_SPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The same: where white space is, if nobody asks for any."""

OF_FIELD = " // of the field "
"""In a grammar, at the end of a line: the field of a request whose schema the line holds."""

MAX_CHARS = 1 << 19
"""Of a schema, an expression, a grammar, or all choices."""

ANNOTATIONS = frozenset(
    (
        *("path", "file-path", "directory-path", "password", "json-string"),
        *("binary", "byte", "base64", "base64url"),  # a promise of fours would keep models from their end
        *("text", "textarea", "multiline", "markdown", "html"),
        *("int32", "int64", "float", "double", "decimal"),  # of numbers, in whose place a string may be
    )
)
"""Formats that say what a string is for, and ask for no form of it."""

HEX = "[0-9a-fA-F]"
PATTERNS = {f"uuid{n}": f"^{HEX}{{8}}-{HEX}{{4}}-{n}{HEX}{{3}}-[89abAB]{HEX}{{3}}-{HEX}{{12}}$" for n in range(1, 9)}
"""Of formats that llguidance does not know."""

MAX_ORDERS = 200
"""In which the items of a list may come that all differ: for each the parser has three of the 2,000 items of a row."""

MAX_ORDER_CHARS = 1 << 17
"""Of all orders of one schema, written out."""

NOTES = frozenset(("title", "description", "default", "examples", "deprecated"))
OF_LISTS = NOTES | {"type", "minItems", "maxItems"}
VALUES = frozenset(("enum", "const", "default", "examples", "x-guidance"))
"""Keywords that hold values, which may look like schemas."""

NAMED = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
"""Keywords that hold schemas by names, which may look like keywords."""

INSIDE = {"minimum": inf, "exclusiveMinimum": inf, "maximum": -inf, "exclusiveMaximum": -inf}
"""Bounds, and where from them the numbers are that they allow."""

MAX_WHOLE, MAX_DIGITS, MAX_POWER = 1 << 63, 1 << 53, 22
"""Of numbers that are read right: a whole one, the digits of another, and their power of ten."""

KINDS = {"string": str, "integer": int, "boolean": bool, "null": type(None)}


def promised(schema: Any, field: str) -> Any:
    """A schema that says the same, or asks for more. The given one is not changed.

    Args:
        field: of the request, for errors.

    Raises:
        InvalidSamplingParams: a value has a number that llguidance would read as another.
    """
    return _Schema(schema, field).promised(schema)


class _Schema:
    def __init__(self, root: Any, field: str):
        self.root, self.field, self.left = root, field, MAX_ORDER_CHARS

    def promised(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.promised(own) for own in schema]
        if not isinstance(schema, Mapping):
            return schema
        own: dict[str, Any] = {}
        for name, value in schema.items():
            if name in NAMED and isinstance(value, Mapping):
                own[name] = {key: self.promised(inner) for key, inner in value.items()}
            elif name in INSIDE and type(value) in (int, float):
                own[name] = _within(value, INSIDE[name])
            else:
                own[name] = value if name in VALUES else self.promised(value)
            if name in ("enum", "const"):
                self._check_numbers(name, value)
        if str(own.get("$ref")).startswith(("/$defs/", "/definitions/")):  # so litellm writes to Anthropic
            own["$ref"] = f"#{own['$ref']}"
        form = str(own.get("format"))
        if form in ANNOTATIONS:
            del own["format"]
        elif form in PATTERNS and "pattern" not in own:
            own["pattern"] = PATTERNS[own.pop("format")]
        elif form == "ipvanyaddress" and "anyOf" not in own:
            del own["format"]
            own["anyOf"] = [{"format": "ipv4"}, {"format": "ipv6"}]
        names = self._values(own.get("propertyNames"))
        is_alone = not own.keys() & {"properties", "patternProperties"}
        if names and is_alone and all(isinstance(name, str) for name in names):
            del own["propertyNames"]
            own["properties"] = dict.fromkeys(names, own.get("additionalProperties", True))
            own["additionalProperties"] = False
        return self._differing(own) if "uniqueItems" in own else own

    def _check_numbers(self, name: str, value: Any) -> None:
        """Raises InvalidSamplingParams if a value holds a number that may be read as another."""
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        for own in inner:
            self._check_numbers(name, own)
        if _is_misread(value):
            instead = "use one of at most 15 digits, or a string"
            raise InvalidSamplingParams(
                f"{self.field}: {name} has the number {shown(value)}, which no grammar can hold: {instead}"
            )

    def _differing(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A list with `uniqueItems`, with a schema for each order of its items; itself where there are too many."""
        rest, most = {name: value for name, value in schema.items() if name != "uniqueItems"}, schema.get("maxItems")
        if schema["uniqueItems"] is False or most in (0, 1):
            return rest
        values = self._values(rest.pop("items", None))
        is_plain = (schema["uniqueItems"], rest.get("type")) == (True, "array") and rest.keys() <= OF_LISTS
        if not is_plain or values is None or len(values) > MAX_ORDERS or not isinstance(most, int | None):
            return schema
        most = len(values) if most is None else min(most, len(values))
        count = 0 if most < 1 else perm(len(values), most)
        size = count * sum(len(str(value)) + 12 for value in values)
        if not 0 < count <= MAX_ORDERS or size > self.left:
            return schema
        self.left -= size
        orders = permutations([{"const": value} for value in values], most)
        return rest | {"maxItems": most, "anyOf": [{"prefixItems": list(order)} for order in orders]}

    def _values(self, schema: Any) -> list[Any] | None:
        """All that a schema has, each once; None if that is more than strings, whole numbers, truth values and null."""
        asked = _asked(schema)
        if asked.keys() == {"$ref"}:
            place, _, name = str(asked["$ref"]).removeprefix("#").removeprefix("/").partition("/")
            asked = _asked(_asked(self.root.get(place) if place in NAMED else None).get(name))
        found = [False, True] if asked == {"type": "boolean"} else asked.get("enum", [asked.get("const", ...)])
        is_plain = asked.keys() <= {"enum", "const", "type"} and not asked.keys() >= {"enum", "const"}
        kinds = KINDS.values() if "type" not in asked else [KINDS.get(str(asked["type"]))]
        if not is_plain or not isinstance(found, list) or any(type(value) not in kinds for value in found):
            return None
        return list({(type(value), value): value for value in found}.values())


def _within(bound: Any, inside: float) -> Any:
    """A bound, or the next float of those that it allows where llguidance may read or compute another one."""
    if abs(bound) >= MAX_WHOLE:  # it refuses such a bound, or takes 64 bits for it: asks for more
        return bound
    return type(bound)(nextafter(bound, inside)) if abs(bound) >= MAX_DIGITS or _is_misread(bound) else bound


def _is_misread(number: Any) -> bool:
    """Whether llguidance may read another number: it makes a float of the digits, and multiplies that by a power of ten."""
    if isinstance(number, float):
        _, digits, exponent = Decimal(repr(number)).as_tuple()
        return int("".join(map(str, digits))) > MAX_DIGITS or abs(int(exponent)) > MAX_POWER
    return type(number) is int and (abs(number) >= MAX_WHOLE or int(float(number)) != number)


def _asked(schema: Any) -> dict[str, Any]:
    """What a schema asks for."""
    return {name: value for name, value in schema.items() if name not in NOTES} if isinstance(schema, Mapping) else {}
