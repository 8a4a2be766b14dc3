"""XmlCalls: reads calls in XML, in which each argument has marks of its own."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from nanoengine.models.tools.calls import CallReader, JsonEnd, NameAndArguments, Outcome, read_call
from nanoengine.models.tools.formats import END_OF_FUNCTION, END_OF_PARAMETER, FUNCTION, PARAMETER
from nanoengine.models.tools.marks import past_space
from nanoengine.models.tools.values import KINDS, Kinds, value_of

MAX_MARK_CHARS = 600
"""The longest mark, with the name in it."""

WORD = r"([^<>\n]{1,500}?)"


HEAD = re.compile(rf"{FUNCTION}{WORD}>")
NEXT = re.compile(rf"{PARAMETER}{WORD}>|{END_OF_FUNCTION}")


class XmlCalls(CallReader):
    """One call.

    Args:
        names: see `CallReader`.
        schemas: of the arguments, by the names of tools. A tool without one takes any arguments.
        kinds: the types of arguments by their schemas, shared by all calls of an answer.
    """

    def __init__(self, names: Collection[str] | None, schemas: Mapping[str, Any], kinds: Kinds):
        super().__init__(names)
        self.schemas, self._kinds = schemas, kinds
        self._name: str | None = None
        self._key: str | None = None  # of the argument whose value is read
        self._begin = 0  # of that value
        self._found: list[tuple[str, int, int]] = []  # keys, and the places of their values
        self._size = 0  # the number of characters that were read before
        self._may_be_json = False  # the value may be an object or a list
        self._json: JsonEnd | None = None  # of a value that is an object or a list: a mark in its strings is text

    def scan(self, text: str, start: int, is_last: bool) -> tuple[Outcome, int]:
        at, outcome = start, None
        while outcome is None:
            outcome, at = (self._mark if self._key is None else self._value)(text, at, self._size - start)
        self._size += at - start
        return (Outcome.TEXT, len(text)) if is_last and outcome is Outcome.MORE else (outcome, at)

    def calls(self, text: str) -> list[NameAndArguments] | None:
        values = {
            key: value_of(text[begin:end].removeprefix("\n").removesuffix("\n"), self._kinds_of(key))
            for key, begin, end in self._found
        }
        found = read_call({"name": self._name, "arguments": values}, self.names)
        return None if found is None else [found]

    def _mark(self, text: str, at: int, offset: int) -> tuple[Outcome | None, int]:
        """Read the name, a key, or the end. None: the call goes on."""
        at = past_space(text, at)
        is_head = self._name is None
        match = (HEAD if is_head else NEXT).match(text, at)
        if match is None:
            begun = text[at : at + MAX_MARK_CHARS]
            marks = (FUNCTION,) if is_head else (PARAMETER, END_OF_FUNCTION)
            may_come = len(begun) < MAX_MARK_CHARS and any(own.startswith(begun[: len(own)]) for own in marks)
            return Outcome.MORE if may_come else Outcome.TEXT, at
        if is_head:
            self._name = match[1]
            return None if self.names is None or self._name in self.names else Outcome.TEXT, match.end()
        if match[1] is None:
            return Outcome.WHOLE, match.end()
        self._key, self._begin = match[1], match.end() + offset
        self._may_be_json = "string" not in self._kinds_of(self._key)
        return None, match.end()

    def _value(self, text: str, at: int, offset: int) -> tuple[Outcome | None, int]:
        assert self._key is not None
        if self._may_be_json:
            at = past_space(text, at)
            if at == len(text):
                return Outcome.MORE, at
            self._may_be_json = False
            self._json = JsonEnd() if text[at] in "{[" else None
        if self._json is not None:
            outcome, at = self._json.find(text, at)
            if outcome is Outcome.MORE:
                return Outcome.MORE, at
            self._json = None
        end = text.find(END_OF_PARAMETER, at)
        if end < 0:
            return Outcome.MORE, max(at, len(text) - len(END_OF_PARAMETER) + 1)
        self._found.append((self._key, self._begin, end + offset))
        self._key = None
        return None, end + len(END_OF_PARAMETER)

    def _kinds_of(self, key: str) -> frozenset[str]:
        """The types that an argument may have."""
        schema = self.schemas.get(self._name or "", True)
        if not isinstance(schema, Mapping):
            return KINDS
        properties = schema.get("properties")
        own = properties.get(key) if isinstance(properties, Mapping) else None
        return self._kinds.of(schema.get("additionalProperties", True) if own is None else own, schema)
