"""The grammar of a call in XML: arguments in any order; `value_of` reads each by its schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from nanoengine.core.errors import InvalidSamplingParams
from nanoengine.features.tool_calls.formats import END_OF_FUNCTION, END_OF_PARAMETER, PARAMETER
from nanoengine.features.tool_calls.json_grammar import MAX_ITEMS
from nanoengine.features.tool_calls.rules import Rules
from nanoengine.features.tool_calls.tool import Tool
from nanoengine.features.tool_calls.values import MAX_LOOKS, Kinds, kind_of, resolved, value_of

GAP = "\n"
"""White space between two delimiters and around a value. Grammars require it; `XmlCalls` also reads calls without it."""

MAX_NESTED = 8
"""Depth of `anyOf` and references in the schema of a value that may be a string."""

NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
"""Keywords that do not restrict a value."""

OF_ARGUMENTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
LENGTHS = {"minLength", "maxLength"}

TYPES: dict[str, Any] = {
    **dict.fromkeys(("enum", "anyOf", "required"), list),
    **dict.fromkeys(LENGTHS, int),
    "properties": Mapping,
    "type": str | list,
}
"""Types that the values of keywords must have."""

SCALARS = {
    "null": '"null"',
    "boolean": '"true" | "false"',
    "integer": "/-?(0|[1-9][0-9]{0,15})/",
    "number": r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?/",
}
"""Terminals of values of a type, where the value may be a string, too."""

TABLES = {"array": r"\[", "object": r"\{"}
"""Types whose values are JSON, and patterns of their first character."""


def xml_call(rules: Rules, kinds: Kinds, tool: Tool, schema: Mapping[str, Any]) -> str:
    """A rule for a call of a tool, from its name on.

    Args:
        rules: of the grammar; terminals are added to them.
        kinds: counts the schemas of all tools that are looked at.

    Raises:
        InvalidSamplingParams: the grammar cannot hold a call to this schema; the message names the keyword.
    """
    try:
        arguments = _Arguments(rules, kinds, schema, tool.field).rule()
    except _Refused as error:
        message = f" of {tool.name} have {error}, which cannot be promised of calls in XML"
        raise InvalidSamplingParams(tool.field, message) from None
    return f"{rules.say(tool.name, '>', GAP)} {arguments} {rules.say(END_OF_FUNCTION)}"


class _Refused(Exception):
    """Holds the keyword, or the count that is too large."""


class _Arguments:
    def __init__(self, rules: Rules, kinds: Kinds, schema: Mapping[str, Any], field: str):
        self.rules, self.kinds, self.schema, self.field = rules, kinds, schema, field

    def rule(self) -> str:
        if dict(self.schema) == {"type": "object"}:
            self.rules.rules["KEY"] = r"/[^<>\n]{1,100}/"
            before = f"{self.rules.say(PARAMETER)} KEY {self.rules.say('>', GAP)}"
            return f"({before} {self._value(True)} {self.rules.say(GAP)})*"
        _check(self.schema, OF_ARGUMENTS)
        properties, required = self.schema.get("properties", {}), set(self.schema.get("required", ()))
        others = dict.fromkeys(sorted(required - set(properties)), self.schema.get("additionalProperties", True))
        arguments: list[str] = []
        for name in sorted({**properties, **others}, key=lambda name: name not in required):
            schema = properties.get(name, others.get(name))
            if schema is not False:
                arguments.append(
                    f"{self.rules.say(PARAMETER, name, '>', GAP)} {self._value(schema)} {self.rules.say(GAP)}"
                )
            elif name in required:
                raise _Refused("required")
        if not 0 < len(arguments) <= MAX_ITEMS:
            count = len(required)
            return " ".join((*arguments[:count], *(f"({argument})?" for argument in arguments[count:])))
        name, end = f"arguments_{len(self.rules.rules)}", f" %if is_ones([0:{len(required)}])" if required else ""
        choices = [f"{argument} {name}::set_bit({bit}) %if bit_clear({bit})" for bit, argument in enumerate(arguments)]
        self.rules.rules[f"{name}::_"] = " | ".join((f'""{end}', *choices))
        return f"{name}::0x0"

    def _value(self, schema: Any) -> str:
        """A value and its end delimiter."""
        kinds = self.kinds.of(schema, self.schema)
        self._look(0)
        if "string" not in kinds:
            return self._json(schema)
        branches = self._branches(schema, 0)
        if {} in branches:
            branches = [{}]
        tables = [branch for branch in branches if branch.get("type") in TABLES]
        words = [word for branch in branches if branch.get("type") not in TABLES for word in _words(branch, kinds)]
        if not words:
            return self._json({"anyOf": tables})
        text = " | ".join(f"({word})" for word in words)
        if tables:  # a string that begins as one of them would be read as one
            text = rf"({text}) & ~/\s*[{''.join(TABLES[table['type']] for table in tables)}](?s:.*)/"
        name = self.rules.terminal(f"({self.rules.without(text, END_OF_PARAMETER)}) {json.dumps(GAP)}")
        text = self.rules.up_to(name.lower(), END_OF_PARAMETER, text=name)
        return f"({text} | {self._json({'anyOf': tables})})" if tables else text

    def _json(self, schema: Any) -> str:
        keywords = dict(schema) if isinstance(schema, Mapping) else {}
        whole = {name: self.schema[name] for name in ("$defs", "definitions") if name in self.schema} | keywords
        references = re.findall(r'"\$ref": "([^"]*)"', json.dumps(whole))
        if any(not name.startswith(("#/$defs/", "#/definitions/")) for name in references):
            raise _Refused("$ref")
        return f"{self.rules.json(whole, self.field)} {self.rules.say(GAP, END_OF_PARAMETER)}"

    def _branches(self, schema: Any, depth: int) -> list[dict[str, Any]]:
        """Schemas without `anyOf` and references; a value fits one of them. Each is {} (any value), has values ("enum"), or has
        one type: of a string with its lengths, of a table with all keywords, of others alone.
        """
        self._look(1)
        if depth > MAX_NESTED or not (isinstance(schema, Mapping) or schema is True):
            raise _Refused("$ref" if depth > MAX_NESTED else "anyOf")
        keywords = {name: value for name, value in ({} if schema is True else schema).items() if name not in NOTES}
        if "$ref" in keywords:
            _check(keywords, {"$ref"})
            return self._branches(resolved(keywords["$ref"], self.schema), depth + 1)
        if "anyOf" in keywords:
            _check(keywords, {"anyOf"})
            branches = [branch for each in keywords["anyOf"] for branch in self._branches(each, depth + 1)]
            values = [value for branch in branches for value in branch.get("enum", ()) if not isinstance(value, str)]
            if values and any(branch.get("type") == "string" for branch in branches):
                raise _Refused("enum")  # another string might be read as a value that is none of these
            return branches
        if keywords.keys() & {"enum", "const"}:
            _check(keywords, {"enum", "const", "type"})
            values = keywords.get("enum", [keywords.get("const")])
            self._look(len(values))
            may_be = self.kinds.of(schema, self.schema)
            return [{"enum": [value for value in values if kind_of(value) in may_be]}]
        types = keywords.get("type", [])
        if types in ("array", "object"):
            return [keywords]
        types = types if isinstance(types, list) else [types]
        _check(keywords, {"type", *(LENGTHS if "string" in types else ())})
        if not all(kind in ("string", *SCALARS, *TABLES) for kind in types):
            raise _Refused("type")
        lengths = {name: value for name, value in keywords.items() if name in LENGTHS}
        return [{"type": kind, **(lengths if kind == "string" else {})} for kind in types] or [{}]

    def _look(self, count: int) -> None:
        """Count schemas and values of enumerations; raises _Refused where there are too many."""
        self.kinds.left -= count
        if self.kinds.left < 0:
            raise _Refused(f"more than {MAX_LOOKS} schemas and values of enum, as often as they are referred to")


def _words(branch: Mapping[str, Any], kinds: frozenset[str]) -> list[str]:
    """Terminals of the values of a branch, which are no tables."""
    if "enum" in branch:
        values = [value for value in branch["enum"] if kind_of(value) == "string" or kind_of(value) in SCALARS]
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        pairs = zip(texts, values, strict=True)
        return [json.dumps(text) for text, value in pairs if kind_of(value_of(text, kinds)) == kind_of(value)]
    min_length, max_length = branch.get("minLength", 0), branch.get("maxLength", "")
    if min_length or max_length != "":
        return [f"/(?s:.{{{min_length},{max_length}}})/"]
    return [SCALARS.get(branch.get("type", ""), "TEXT")]


def _check(schema: Mapping[str, Any], known: set[str]) -> None:
    """Refuse keywords that are not known, and values that they cannot have."""
    for name, value in schema.items():
        if (name not in known and name not in NOTES) or not isinstance(value, TYPES.get(name, object)):
            raise _Refused(name)
    if not all(isinstance(name, str) for name in schema.get("required", ())):
        raise _Refused("required")
