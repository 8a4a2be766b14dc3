"""Schemas in words that llguidance can promise: formats that ask for nothing, names of properties, objects that are closed.

No schema is made weaker: what cannot be said in other words stays as it is, and llguidance refuses it by its keyword. But it
reads each number as a float, and would write 9007199254740992 for the constant 9007199254740993: so that is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from math import inf, nextafter
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


def promised(schema: Any, field: str) -> Any:
    """A schema that says the same, or asks for more. The given one is not changed.

    An object with `properties` has no others where `additionalProperties` is unsaid, as in vLLM's xgrammar (`strict_mode`) and
    in llama.cpp: models write a name with a space too many rather than the right one. It stays open where the schema says
    more of the same object elsewhere: beside `allOf`, `anyOf`, `$ref` and their like, and in them.

    Args:
        field: of the request, for errors.

    Raises:
        InvalidSamplingParams: a value has a number that llguidance would read as another.
    """
    return _Schema(schema, field).promised(schema)


class _Schema:
    def __init__(self, root: Any, field: str):
        self.root, self.field = root, field
        self.open = _joined(root)

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
        names = values_of(own.get("propertyNames"), self.root)
        is_alone = not own.keys() & {"properties", "patternProperties"}
        if names and is_alone and all(isinstance(name, str) for name in names):
            del own["propertyNames"]
            own["properties"] = dict.fromkeys(names, own.get("additionalProperties", True))
            own["additionalProperties"] = False
        if own.get("uniqueItems") is False or own.get("maxItems") in (0, 1):
            own.pop("uniqueItems", None)
        if own.get("minContains") == 0 and "maxContains" not in own:
            del own["minContains"]
            own.pop("contains", None)
        is_closed = not own.keys() & (IN_PLACE | OF_NAMES - {"properties", "patternProperties"})
        if is_closed and isinstance(own.get("properties"), dict) and id(schema) not in self.open:
            required = own.get("required")
            asked = (
                dict.fromkeys((name for name in required if isinstance(name, str)), True)
                if isinstance(required, list)
                else {}
            )
            own |= {
                "properties": own["properties"] | {name: True for name in asked if name not in own["properties"]},
                "additionalProperties": False,
            }
        return own

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


def values_of(schema: Any, root: Any) -> list[Any] | None:
    """All that a schema has, each once; None if that is more than strings, whole numbers, truth values and null."""
    asked = _asked(schema)
    if asked.keys() == {"$ref"}:
        asked = _asked(definition(asked["$ref"], root))
    found = [False, True] if asked == {"type": "boolean"} else asked.get("enum", [asked.get("const", ...)])
    is_plain = asked.keys() <= {"enum", "const", "type"} and not asked.keys() >= {"enum", "const"}
    kinds = KINDS.values() if "type" not in asked else [KINDS.get(str(asked["type"]))]
    if not is_plain or not isinstance(found, list) or any(type(value) not in kinds for value in found):
        return None
    return list({(type(value), value): value for value in found}.values())


def definition(reference: Any, root: Any) -> Any:
    """What a reference to one of the definitions of a schema means; None if it is another one."""
    table, _, name = str(reference).removeprefix("#").removeprefix("/").partition("/")
    found = _asked(_asked(root).get(table)) if table in ("$defs", "definitions") else {}
    return found.get(name)


def _joined(root: Any) -> set[int]:
    """Which schemas say of an object what others say more of: their identities."""
    found: set[int] = set()
    left = [(root, False)]
    while left:
        schema, is_joined = left.pop()
        if isinstance(schema, list):
            left += ((own, is_joined) for own in schema)
        if not isinstance(schema, Mapping) or (is_joined and id(schema) in found):
            continue
        if is_joined:
            found.add(id(schema))
        several = schema.get("allOf")
        is_one = len(schema.keys() & IN_PLACE) <= 1 and not schema.keys() & OF_NAMES
        below = is_joined or not is_one or (isinstance(several, list) and len(several) > 1)
        for name, value in schema.items():
            if name == "$ref":
                left += [(definition(value, root), True)] if below else []
            elif name in NAMED and isinstance(value, Mapping):
                left += ((own, name == "dependentSchemas") for own in value.values())
            elif name not in VALUES:
                left.append((value, below and name in IN_PLACE))
    return found


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
