"""Rules: the rules of a grammar in llguidance's Lark syntax, with texts, delimiters and tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from nanoengine.core.errors import InvalidSamplingParams
from nanoengine.features.tool_calls.json_grammar import JsonRules, NoRules
from nanoengine.features.tool_calls.schemas import JSON_OPTIONS, MAX_CHARS, OF_FIELD, ONE_SPACE

FindToken = Callable[[str], int | None]
"""The id of an added token; None if the text is not one."""


class Rules:
    """Grammar rules by name. `TEXT` matches any text.

    Args:
        find: the token id of a delimiter.
    """

    def __init__(self, find: FindToken):
        self.find = find
        self._names: dict[str, str] = {}
        self._left = MAX_CHARS
        self.rules = {"start": "", "TEXT": r"/(.|\n)*/"}

    def text(self) -> str:
        return "%llguidance {}\n" + "\n".join(f"{name}: {rule}" for name, rule in self.rules.items())

    def say(self, *texts: str) -> str:
        """A sequence of texts, each of which may be a token. White space is never a token, although some models have such
        added tokens: llguidance cannot roll back drafts that contain such a token by its id.
        """
        terms: list[str] = []
        plain = ""
        for text in texts:
            token = self.find(text) if text.strip() else None
            if token is None:
                plain += text
                continue
            terms += [json.dumps(plain), f"<[{token}]>"] if plain else [f"<[{token}]>"]
            plain = ""
        return " ".join([*terms, json.dumps(plain)] if plain else terms)

    def json(
        self, schema: Mapping[str, Any], field: str, spaces: Mapping[str, Any] = ONE_SPACE, *, is_apart: bool = True
    ) -> str:
        """The name of a rule for the JSON of a schema.

        Args:
            schema: from `normalized_schema`.
            field: of the request that holds the schema, for errors.
            spaces: options of llguidance for white space.
            is_apart: it may be split into rules.

        Raises:
            InvalidSamplingParams: the schemas of the grammar are too long in total.
        """
        name = f"json_{len(self.rules)}"
        try:
            json_rules = JsonRules(schema, field, spaces, name, self._left if is_apart else 0)
        except NoRules:
            text = json.dumps({**schema, "x-guidance": {**JSON_OPTIONS, **spaces}})
            self._left -= len(text)
            if self._left < 0:
                raise InvalidSamplingParams(
                    field,
                    f": the schemas of the grammar have more than {MAX_CHARS} characters, all in all: use fewer "
                    "tools, fewer properties or fewer $defs",
                ) from None
            self.rules[name] = f"%json {text}{OF_FIELD}{field}"
            return name
        self.rules |= json_rules.rules
        self._left = json_rules.num_left
        return json_rules.name

    def up_to(self, name: str, *delimiters: str, text: str = "TEXT") -> str:
        """A text up to and with the first of some delimiters, as a token or in characters."""
        self.rules[f"{name}[lazy]"] = f"{text} ({' | '.join(map(json.dumps, delimiters))})"
        tokens = [f"{text} <[{token}]>" for token in map(self.find, delimiters) if token is not None]
        return f"({' | '.join([name, *tokens])})"

    def terminal(self, rule: str) -> str:
        """The name of a terminal; equal terminals have one name."""
        name = self._names.setdefault(rule, f"VALUE_{len(self._names)}")
        self.rules[name] = rule
        return name

    def without(self, text: str, *delimiters: str) -> str:
        """The terminal of a text that holds none of some delimiters."""
        return f"({text}) & ~(TEXT ({' | '.join(map(json.dumps, delimiters))}) TEXT)"
