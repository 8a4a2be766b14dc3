"""Rules: the rules of a grammar, with texts and marks in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from nanoengine.core.errors import InvalidSamplingParams
from nanoengine.features.tool_calls.json_grammar import JsonRules, NoRules
from nanoengine.features.tool_calls.schemas import JSON_OPTIONS, MAX_CHARS, OF_FIELD, ONE_SPACE

FindToken = Callable[[str], int | None]
"""The id of an added token; None if a text is none."""


class Rules:
    """Rules by their names. `TEXT` is any text.

    Args:
        find: the token of a mark, if it is one.
    """

    def __init__(self, find: FindToken):
        self.find = find
        self._names: dict[str, str] = {}
        self._left = MAX_CHARS
        self.rules = {"start": "", "TEXT": r"/(.|\n)*/"}

    def text(self) -> str:
        return "%llguidance {}\n" + "\n".join(f"{name}: {rule}" for name, rule in self.rules.items())

    def say(self, *texts: str) -> str:
        """A sequence of texts, each of which may be a token. White space is never one, although some models have added tokens of
        it: llguidance does not take back drafts that hold such a token by its id.
        """
        found: list[str] = []
        plain = ""
        for text in texts:
            token = self.find(text) if text.strip() else None
            if token is None:
                plain += text
                continue
            found += [json.dumps(plain), f"<[{token}]>"] if plain else [f"<[{token}]>"]
            plain = ""
        return " ".join([*found, json.dumps(plain)] if plain else found)

    def json(
        self, schema: Mapping[str, Any], field: str, spaces: Mapping[str, Any] = ONE_SPACE, *, is_apart: bool = True
    ) -> str:
        """A rule of the JSON of a schema.

        Args:
            schema: of the value, `promised`.
            field: of the request that holds the schema, for errors.
            spaces: options of llguidance for white space.
            is_apart: it may be taken apart.

        Raises:
            InvalidSamplingParams: the schemas of the grammar are too long, all in all.
        """
        name = f"json_{len(self.rules)}"
        try:
            own = JsonRules(schema, field, spaces, name, self._left if is_apart else 0)
        except NoRules:
            text = json.dumps({**schema, "x-guidance": {**JSON_OPTIONS, **spaces}})
            self._left -= len(text)
            if self._left < 0:
                raise InvalidSamplingParams(
                    f"{field}: the schemas of the grammar have more than {MAX_CHARS} characters, all in all: use fewer "
                    "tools, fewer properties or fewer $defs"
                ) from None
            self.rules[name] = f"%json {text}{OF_FIELD}{field}"
            return name
        self.rules |= own.rules
        self._left = own.num_left
        return own.name

    def up_to(self, name: str, *marks: str, text: str = "TEXT") -> str:
        """A text, and the first mark that comes: as a token or written out."""
        self.rules[f"{name}[lazy]"] = f"{text} ({' | '.join(map(json.dumps, marks))})"
        tokens = [f"{text} <[{token}]>" for token in map(self.find, marks) if token is not None]
        return f"({' | '.join([name, *tokens])})"

    def terminal(self, rule: str) -> str:
        """The name of a terminal; equal ones have one."""
        name = self._names.setdefault(rule, f"VALUE_{len(self._names)}")
        self.rules[name] = rule
        return name

    def without(self, text: str, *marks: str) -> str:
        """The terminal of a text that holds none of some marks."""
        return f"({text}) & ~(TEXT ({' | '.join(map(json.dumps, marks))}) TEXT)"
