"""JsonRules: a JSON schema as grammar rules: properties in any order, `uniqueItems`, and `contains`.

The state of such a rule is a number: a bit for each item that was written, or their count
(https://github.com/guidance-ai/llguidance/blob/main/docs/parametric.md). Everything else is llguidance's `%json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from nanoengine.features.tool_calls.schemas import JSON_OPTIONS, NOTES, OF_FIELD, definition, values_of

MAX_ITEMS = 64
"""Bits of a state: more properties come in the order of the schema."""

MAX_COUNT = 100
"""Items of a list that are counted, in 7 bits."""

OF_ROOT = NOTES | {"$defs", "definitions", "$schema", "$id", "x-guidance"}
OF_OBJECTS = {"type", "properties", "required", "additionalProperties"}
OF_LISTS = {"type", "items", "minItems", "maxItems", "uniqueItems", "contains", "minContains"}
ELSEWHERE = re.compile(r'"\$ref": "(?!#/(\$defs|definitions)/)')
"""In the text of a schema: a reference that means something else where the schema stands alone."""


class NoRules(Exception):
    """The schema stays one `%json` rule."""


class JsonRules:
    """Grammar rules of one schema from `normalized_schema`.

    Args:
        field: of the request, for errors.
        spaces: options of llguidance for white space.
        prefix: of the names of the rules.
        max_chars: the limit of characters of all rules.

    Raises:
        NoRules: `%json` says the same, or they would be longer.
    """

    def __init__(self, root: Mapping[str, Any], field: str, spaces: Mapping[str, Any], prefix: str, max_chars: int):
        self.root, self.field, self.prefix, self.options = root, field, prefix, JSON_OPTIONS | dict(spaces)
        self.rules: dict[str, str] = {}
        self.num_left = max_chars
        self._names: dict[str, str] = {}  # of rules, by the text of a schema or by a reference
        self._waiting: list[tuple[str, Any]] = []  # rules of definitions
        self._plain: dict[int, bool] = {}  # by the identity of a schema
        self.colon, self.comma, self.gap = '": "', '", "', ""
        if spaces.get("whitespace_flexible"):
            space = spaces.get("whitespace_pattern", r"[ \t\r\n]+").replace("/", r"\/")
            self.gap = f"{self._add(f'/{space}/', prefix.upper())}?"
            self.colon, self.comma = (f"{self.gap} {sign} {self.gap}" for sign in ('":"', '","'))
        if self._is_plain(root):
            raise NoRules
        self.name = self._add(self.value(root))
        while self._waiting:
            name, schema = self._waiting.pop()
            self._add(self.value(schema), name)

    def value(self, schema: Any) -> str:
        """The right-hand side of a rule for a value of this schema."""
        keywords = self._keywords(schema)
        if self._is_plain(schema):
            return self._json(schema)
        if "$ref" in keywords:
            if (name := self._names.get(keywords["$ref"])) is None:
                name = self._names[keywords["$ref"]] = f"{self.prefix}_of_{len(self._names)}"
                self._waiting.append((name, definition(keywords["$ref"], self.root)))
            return name
        if "anyOf" in keywords:
            return f"({' | '.join(map(self.value, keywords['anyOf']))})"
        return self._object(keywords) if "properties" in keywords else self._list(keywords)

    def _keywords(self, schema: Any) -> dict[str, Any]:
        if not isinstance(schema, Mapping):
            return {}
        left_out = OF_ROOT if schema is self.root else NOTES
        return {name: value for name, value in schema.items() if name not in left_out}

    def _is_plain(self, schema: Any) -> bool:
        """Whether `%json` generates the same values."""
        if (known := self._plain.get(id(schema))) is None:
            known = self._plain[id(schema)] = self._has_nothing(self._keywords(schema))
        return known

    def _has_nothing(self, keywords: dict[str, Any]) -> bool:
        names, inner = keywords.keys(), keywords.get("anyOf")
        if names == {"$ref"}:
            return definition(keywords["$ref"], self.root) is None
        if names == {"anyOf"} and isinstance(inner, list):
            return all(map(self._is_plain, inner))
        if keywords.get("type") == "object" and names <= OF_OBJECTS:
            properties, required = keywords.get("properties"), keywords.get("required", [])
            if not isinstance(properties, Mapping) or not isinstance(required, list):
                return True
            count = len({*properties, *map(str, required)})
            is_many = count > 1 or bool(count and keywords.get("additionalProperties", True) is not False)
            return count > MAX_ITEMS or not (is_many or not all(map(self._is_plain, properties.values())))
        if keywords.get("type") == "array" and names <= OF_LISTS:
            min_items, max_items = keywords.get("minItems", 0), keywords.get("maxItems", MAX_COUNT)
            if type(min_items) is not int or type(max_items) is not int or not 0 <= min_items <= max_items:
                return True
            differs, holds = keywords.get("uniqueItems") is True, "contains" in names
            if differs:
                values = None if holds else values_of(keywords.get("items"), self.root)
                return not values or not min_items <= len(values) <= MAX_ITEMS
            return max_items > MAX_COUNT or not max_items if holds else self._is_plain(keywords.get("items"))
        return True

    def _object(self, keywords: dict[str, Any]) -> str:
        properties, other = keywords["properties"], keywords.get("additionalProperties", True)
        required = list(dict.fromkeys(keywords.get("required", ())))
        schemas = {name: properties.get(name, other) for name in [*required, *properties]}
        items = [
            f"{_quoted(name)} {self.colon} {self.value(schema)}"
            for name, schema in schemas.items()
            if schema is not False or name in required
        ]
        more = ""
        if other is not False:
            known_names = " | ".join(map(_quoted, schemas))
            name = self._add(rf'/"([^"\\\x00-\x1f]|\\["\\bfnrt])*"/ & ~({known_names})', f"{self.prefix.upper()}_NAME")
            more = f"{name} {self.colon} {self.value(other)}"
        end = f"is_ones([0:{len(required)}])" if required else ""
        on = "" if more else f"not(is_ones([0:{len(items)}]))"
        return self._each_once("{}", items, more, end, on)

    def _list(self, keywords: dict[str, Any]) -> str:
        min_items, max_items, item = keywords.get("minItems", 0), keywords.get("maxItems"), keywords.get("items", True)
        if keywords.get("uniqueItems") is True:
            values = values_of(item, self.root) or []
            max_items = len(values) if max_items is None else min(max_items, len(values))
            bits = f"[0:{len(values)}]"
            end = f"bit_count_ge({bits}, {min_items})" if min_items else ""
            on = f"bit_count_lt({bits}, {max_items})"
            return self._each_once("[]", list(map(_quoted, values)), "", end, on)
        if "contains" in keywords:
            return self._holding(item, keywords["contains"], min_items, max_items)
        item_rule, rest = self.value(item), f"{max(0, min_items - 1)},{'' if max_items is None else max_items - 1}"
        if max_items == 0:
            return self._closed("[]", "")
        several = self._closed("[]", f"{item_rule} ({self.comma} {item_rule}){{{rest}}}")
        return several if min_items else f"({several} | {self._closed('[]', '')})"

    def _holding(self, item: Any, one: Any, min_items: int, max_items: int | None) -> str:
        """A list with at least one item that satisfies `one`."""
        item_rule, match_rule = self.value(item), self._json({"allOf": [item, one]})
        name, count = self._new(), "[0:7]"
        before, behind = (
            ("", "") if max_items is None else (f" %if lt({count}, {max_items - 1})", f" %if lt({count}, {max_items})")
        )
        end = f" %if ge({count}, {min_items})" if min_items else ""
        self._add(
            f"{item_rule} {self.comma} {name}::incr({count}){before} | {match_rule} {name}_on::incr({count})",
            f"{name}::_",
        )
        self._add(f'""{end} | {self.comma} {item_rule} {name}_on::incr({count}){behind}', f"{name}_on::_")
        return self._closed("[]", f"{name}::0x0")

    def _each_once(self, brackets: str, items: list[str], more: str, end: str, on: str) -> str:
        """Items in any order.

        Args:
            more: an item that may come again.
            end, on: conditions of the end, and of one more item; "": always.
        """
        if not items and not more:
            return self._closed(brackets, "")
        name = self._new()
        several = [f"{item} {name}_on::set_bit({bit}) %if bit_clear({bit})" for bit, item in enumerate(items)]
        several += [f"{more} {name}_on::_"] if more else []
        self._add("\n | ".join(several), f"{name}::_")
        conditions = (f" %if {condition}" if condition else "" for condition in (end, on))
        self._add('""{} | {comma} {name}::_{}'.format(*conditions, comma=self.comma, name=name), f"{name}_on::_")
        several_in = self._closed(brackets, f"{name}::0x0")
        return several_in if end else f"({several_in} | {self._closed(brackets, '')})"

    def _closed(self, brackets: str, inner: str) -> str:
        begin, end = map(json.dumps, brackets)
        return f"{begin} {self.gap} {inner} {self.gap if inner else ''} {end}"

    def _json(self, schema: Any) -> str:
        if schema is False:
            raise NoRules
        schema_json = {} if schema is True else dict(schema)
        text = json.dumps(schema_json)
        if ELSEWHERE.search(text) and schema is not self.root:
            raise NoRules
        if '"$ref"' in text:
            schema_json |= {name: self.root[name] for name in ("$defs", "definitions") if name in self.root}
            text = json.dumps(schema_json)
        if (name := self._names.get(text)) is None:
            schema_json["x-guidance"] = self.options
            name = self._names[text] = self._add(f"%json {json.dumps(schema_json)}{OF_FIELD}{self.field}")
        return name

    def _new(self) -> str:
        return f"{self.prefix}_{len(self.rules)}"

    def _add(self, rule: str, name: str = "") -> str:
        """Its name."""
        name = name or self._new()
        if name in self.rules:
            name = f"{name}_{len(self.rules)}"
        self.num_left -= len(rule)
        if self.num_left < 0:
            raise NoRules
        self.rules[name] = rule
        return name


def _quoted(value: Any) -> str:
    """In a grammar, the JSON of a value."""
    return json.dumps(json.dumps(value, ensure_ascii=False))
