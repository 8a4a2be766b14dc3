"""A call in XML, as a grammar: the arguments in the order of the schema, each as `value_of` reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from nanoengine.core.errors import InvalidSamplingParams
from nanoengine.tools.formats import Xml
from nanoengine.tools.rules import Rules
from nanoengine.tools.tool import Tool
from nanoengine.tools.values import MAX_LOOKS, Kinds, kind_of, resolved

MAX_PATTERN_CHARS = 2000

NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
"""Keywords that ask for nothing."""

OF_OBJECTS = NOTES | {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
    "$schema",
    "$id",
}
OF_TABLES = {"items", "properties", "required", "additionalProperties"}
OF_STRINGS = {"minLength", "maxLength", "pattern", "format"}

LOOKS: dict[str, Any] = {
    **dict.fromkeys(("enum", "anyOf", "oneOf", "required"), list),
    **dict.fromkeys(("minLength", "maxLength"), int),
    "properties": Mapping,
    "pattern": str,
    "type": str | list,
}

PLAIN = {
    "null": '"null"',
    "boolean": '"true" | "false"',
    "integer": "/-?(0|[1-9][0-9]{0,15})/",
    "number": r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?/",
}
"""How a value is written that is of a kind, and no more is asked of it."""

READ = {
    "null": r"/\s*null\s*/",
    "boolean": r"/\s*(true|false)\s*/",
    "integer": r"/\s*-?[0-9][0-9.eE+\-]*\s*/",
    "number": r"/\s*-?[0-9][0-9.eE+\-]*\s*/",
    "array": r"/\s*\[(?s:.*)/",
    "object": r"/\s*\{(?s:.*)/",
}
"""What might be read as a kind, where a string may be, too: it is not written as a string."""


def xml_call(rules: Rules, xml: Xml, kinds: Kinds, tool: Tool, schema: Mapping[str, Any]) -> str:
    """A call of a tool, from its name on.

    Args:
        kinds: of the values of all tools.

    Raises:
        InvalidSamplingParams: what cannot be promised; the message names the keyword.
    """
    try:
        arguments = _Arguments(rules, xml, kinds, schema, tool.field)
        return f"{rules.say(*xml.name[:1], tool.name, xml.name[1], xml.gap)} {arguments.text()} {rules.say(xml.end)}"
    except _Refused as error:
        raise InvalidSamplingParams(
            f"{tool.field} of {tool.name} have {error}, which cannot be promised of calls in XML"
        ) from None


class _Refused(Exception):
    """Holds the keyword, or what there is too much of."""


class _Arguments:
    """The arguments of one call."""

    def __init__(self, rules: Rules, xml: Xml, kinds: Kinds, schema: Mapping[str, Any], field: str):
        self.rules, self.xml, self.kinds, self.schema, self.field = rules, xml, kinds, schema, field

    def text(self) -> str:
        """All of them."""
        if dict(self.schema) == {"type": "object"}:
            self.rules.rules["KEY"] = r"/[^<>\n]{1,100}/"
            return f"({self._argument(None, True)})*"
        _check(self.schema, OF_OBJECTS)
        required = set(self.schema.get("required", ()))
        others = self.schema.get("additionalProperties", True)
        own = self.schema.get("properties", {})
        properties = dict.fromkeys(sorted(required - set(own)), others)
        found = []
        for name, schema in ({**own, **properties}).items():
            if schema is not False:
                argument = self._argument(name, schema)
                found.append(argument if name in required else f"({argument})?")
            elif name in required:
                raise _Refused("required")
        return " ".join(found)

    def _argument(self, name: str | None, schema: Any) -> str:
        xml = self.xml
        key, end = (xml.key[0], *([] if name is None else [name])), (xml.key[1],)
        value = (xml.gap, xml.value[0]) if xml.value[0] else ()
        if name is None:
            before = f"{self.rules.say(*key)} KEY {self.rules.say(*end, *value, xml.pad)}"
        else:
            before = self.rules.say(*key, *end, *value, xml.pad)
        return f"{before} {self._value(schema)} {self.rules.say(xml.gap)}"

    def _value(self, schema: Any) -> str:
        """A value, and the mark behind it."""
        kinds = self.kinds.of(schema, self.schema)
        self._look(0)
        if "string" not in kinds:
            return self._json(schema)
        leaves = [{}] if schema is True else self._leaves(schema, 0)
        tables = [own for own in leaves if own.get("type") in ("array", "object")]
        others = [own for own in leaves if own.get("type") not in ("array", "object")]
        text = self._text(others, kinds if {} not in leaves else frozenset())
        return f"({text} | {self._json({'anyOf': tables})})" if tables else text

    def _json(self, schema: Any) -> str:
        own = dict(schema) if isinstance(schema, Mapping) else {}
        kept = {name: self.schema[name] for name in ("$defs", "definitions") if name in self.schema}
        whole = {**kept, **own}
        named = re.findall(r'"\$ref": "([^"]*)"', json.dumps(whole))
        if any(not name.startswith(("#/$defs/", "#/definitions/")) for name in named):
            raise _Refused("$ref")
        return f"{self.rules.json(whole, self.field)} {self.rules.say(self.xml.pad, self.xml.value[1])}"

    def _leaves(self, schema: Any, depth: int) -> list[dict[str, Any]]:
        """Schemas of one kind each, any of which a value may fit."""
        self._look(1)
        if not isinstance(schema, Mapping) or depth > 8:
            raise _Refused("$ref" if depth > 8 else "anyOf")
        own = {name: value for name, value in schema.items() if name not in NOTES}
        if "$ref" in own:
            _check(own, {"$ref"})
            return self._leaves(resolved(own["$ref"], self.schema), depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if keyword in own:
                _check(own, {keyword})
                found = [leaf for each in own[keyword] for leaf in self._leaves(each, depth + 1)]
                if keyword == "oneOf" and _may_overlap(found):
                    raise _Refused(keyword)
                return found
        values = own.get("enum", [own["const"]] if "const" in own else None)
        if values is not None:
            _check(own, {"enum", "const", "type"})
            may_be = self.kinds.of(schema, self.schema)
            self._look(len(values))
            return [{"enum": [each]} for each in values if kind_of(each) in may_be]
        if "type" not in own:
            _check(own, set())
            return [{}]
        if own["type"] == "string":
            _check(own, {"type", *OF_STRINGS} - {"format"})
        if isinstance(own["type"], str):
            return [own]
        _check(own, {"type", *OF_STRINGS, *OF_TABLES})
        return [
            leaf
            for kind in own["type"]
            for leaf in self._leaves(
                {key: value for key, value in own.items() if (kind == "string") == (key in OF_STRINGS)}
                | {"type": kind},
                depth + 1,
            )
        ]

    def _look(self, count: int) -> None:
        """So many more schemas, or values of enumerations, are looked at."""
        self.kinds.left -= count
        if self.kinds.left < 0:
            raise _Refused(f"more than {MAX_LOOKS} schemas and values of enum, as often as they are referred to")

    def _text(self, leaves: list[dict[str, Any]], kinds: frozenset[str]) -> str:
        """A value that is written as it is: what might be read as another kind is written where no more is asked of that."""
        strings = [_string(own) for own in leaves if own.get("type", "string") == "string" and not _is_scalar(own)]
        plain = [_plain(own) for own in leaves if own.get("type", "string") != "string" or _is_scalar(own)]
        excluded = "".join(f" & ~{READ[kind]}" for kind in sorted(kinds - {"string"}))
        words = [f"({own}){excluded}" for own in strings] + [own for own in plain if own]
        pad, mark = self.xml.pad, self.xml.value[1]
        body = " | ".join(f"({own})" for own in words)
        rule = f"({self.rules.without(body, mark)}) {json.dumps(pad)}" if pad else self.rules.without(body, mark)
        name = self.rules.terminal(rule)
        return self.rules.up_to(name.lower(), mark, text=name)


def _may_overlap(leaves: list[dict[str, Any]]) -> bool:
    """Whether a value may fit several of some schemas."""
    values = [json.dumps(own["enum"]) for own in leaves if "enum" in own]
    kinds = ["number" if own.get("type") == "integer" else own.get("type") for own in leaves if "enum" not in own]
    return (bool(values) and bool(kinds)) or any(len(own) > len(set(own)) for own in (values, kinds)) or {} in leaves


def _is_scalar(leaf: Mapping[str, Any]) -> bool:
    """Whether it is one value, that is no string."""
    return "enum" in leaf and not isinstance(leaf["enum"][0], str)


def _plain(leaf: Mapping[str, Any]) -> str:
    """A value of another kind, as JSON has it; empty if that cannot be said here."""
    if "enum" in leaf:
        return json.dumps(json.dumps(leaf["enum"][0])) if kind_of(leaf["enum"][0]) in PLAIN else ""
    return PLAIN.get(leaf["type"], "") if leaf.keys() == {"type"} else ""


def _string(leaf: Mapping[str, Any]) -> str:
    if "enum" in leaf:
        return json.dumps(leaf["enum"][0])
    least, most = leaf.get("minLength", 0), leaf.get("maxLength", "")
    parts = [f"/(?s:.{{{least},{most}}})/"] if least or most != "" else ["TEXT"]
    if "pattern" in leaf:
        parts.append(_whole(leaf["pattern"]))
    return " & ".join(parts)


def _whole(pattern: str) -> str:
    """An expression for all of a text in which a pattern is found."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise _Refused(f"a pattern of {len(pattern)} characters, more than {MAX_PATTERN_CHARS}")
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$\Z", pattern) is not None
    inner = pattern[begins : len(pattern) - ends]
    # Without what is escaped, and classes, the last of which may have no end: nothing is read twice.
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z)", "", inner, flags=re.DOTALL)
    depths = [0, *accumulate((own == "(") - (own == ")") for own in bare)]  # in groups
    is_choice = any(own == "|" and not depth for own, depth in zip(bare, depths, strict=False))
    is_balanced = min(depths) == depths[-1] == 0
    if (
        "^" in bare
        or "$" in bare
        or "(?" in bare.replace("(?:", "")
        or (is_choice and (begins or ends))
        or not is_balanced
    ):
        raise _Refused("pattern")
    around = ["" if begins else "(?s:.*)", "" if ends else "(?s:.*)"]
    text = re.sub(r"\\.|/", lambda own: r"\/" if own[0] == "/" else own[0], inner, flags=re.DOTALL).replace("\n", r"\n")
    return f"/{around[0]}({text}){around[1]}/"


def _check(schema: Mapping[str, Any], known: set[str]) -> None:
    """Whether all that a schema asks for is known here, and looks as it must."""
    for name, value in schema.items():
        if (name not in known and name not in NOTES) or not isinstance(value, LOOKS.get(name, object)):
            raise _Refused(name)
    if not all(isinstance(name, str) for name in schema.get("required", ())):
        raise _Refused("required")
