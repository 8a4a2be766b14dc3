"""XmlCalls: a reader of calls in XML, with delimiters around each argument."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from nanoengine.features.tool_calls.delimiters import Delimiters, past_space
from nanoengine.features.tool_calls.formats import END_OF_FUNCTION, END_OF_PARAMETER, FUNCTION, PARAMETER
from nanoengine.features.tool_calls.json_calls import CallReader, JsonEnd, Outcome
from nanoengine.features.tool_calls.json_text import dumps
from nanoengine.features.tool_calls.values import Kinds, value_of

MAX_DELIMITER_CHARS = 600
"""Limit of a delimiter with the name in it."""

NO_SCHEMA: Mapping[str, Any] = {}
WORD = r"([^<>\n]{1,500}?)"


HEAD = re.compile(rf"{FUNCTION}{WORD}>")
END = Delimiters([END_OF_PARAMETER])
NEXT = re.compile(rf"{PARAMETER}{WORD}>|{END_OF_FUNCTION}")


class XmlCalls(CallReader):
    """One call.

    Args:
        names: see `CallReader`.
        schemas: of the arguments, by the names of tools. A tool without a schema accepts any arguments.
        kinds: the types of arguments by their schemas, common to all calls of an answer.
    """

    def __init__(self, names: Collection[str], schemas: Mapping[str, Any], kinds: Kinds):
        super().__init__(names)
        self.schemas, self._kinds = schemas, kinds
        self._between = "{"  # the text before the next key, or behind the last value
        self._value: XmlValue | None = None  # of the current argument

    def scan(self, text: str, start: int, is_last: bool) -> tuple[Outcome, int]:
        at, outcome = start, None
        while outcome is None:
            outcome, at = self._read_delimiter(text, at) if self._value is None else self._read_value(text, at)
        return outcome, at

    def _read_delimiter(self, text: str, at: int) -> tuple[Outcome | None, int]:
        """Read the name, a key, or the end. None: the call continues."""
        at = past_space(text, at)
        is_head = self.name is None
        match = (HEAD if is_head else NEXT).match(text, at)
        if match is None:
            begun = text[at : at + MAX_DELIMITER_CHARS]
            delimiters = (FUNCTION,) if is_head else (PARAMETER, END_OF_FUNCTION)
            may_come = len(begun) < MAX_DELIMITER_CHARS and any(
                text.startswith(begun[: len(text)]) for text in delimiters
            )
            return Outcome.MORE if may_come else Outcome.TEXT, at
        if is_head:
            if match[1] not in self.names:
                return Outcome.TEXT, match.end()
            self.name = match[1]
        elif match[1] is None:
            self.pieces.append("{}" if self._between == "{" else "}")
            return Outcome.WHOLE, match.end()
        else:
            self.pieces.append(f"{self._between}{dumps(match[1])}: ")
            self._between, self._value = ", ", XmlValue(self._kinds_of(match[1]), self.pieces)
        return None, match.end()

    def _read_value(self, text: str, at: int) -> tuple[Outcome | None, int]:
        assert self._value is not None
        outcome, at = self._value.scan(text, at)
        if outcome is Outcome.MORE:
            return outcome, at
        self._value = None
        return None, at

    def _kinds_of(self, key: str) -> frozenset[str]:
        """The types that an argument may have."""
        schema = self.schemas.get(self.name or "", NO_SCHEMA)
        properties, others = schema.get("properties"), schema.get("additionalProperties", True)
        return self._kinds.of(properties.get(key, others) if isinstance(properties, Mapping) else others, schema)


class XmlValue:
    """Incremental reader of one argument. A string is streamed; any other value is emitted when it is complete.

    Args:
        kinds: its types.
        pieces: of JSON text; those of the argument are added.
    """

    def __init__(self, kinds: frozenset[str], pieces: list[str]):
        self._kinds, self._is_string, self.pieces = kinds, kinds == {"string"}, pieces
        if self._is_string:
            self.pieces.append('"')
        self._may_be_table = "string" not in kinds  # it may be an object or a list
        self._table: JsonEnd | None = None  # if it is: a delimiter in its strings is text
        self._text: list[str] = []  # that is not emitted
        self._is_fresh = True  # no character was read

    def scan(self, text: str, start: int) -> tuple[Outcome, int]:
        """As `CallReader.scan`: MORE, or WHOLE with the end delimiter."""
        at = start
        if self._may_be_table:
            at = past_space(text, at)
            if at == len(text):
                return Outcome.MORE, self._add(text[start:at], at)
            self._may_be_table = False
            self._table = JsonEnd() if text[at] in "{[" else None
        if self._table is not None:
            outcome, at = self._table.scan(text, at)
            if outcome is Outcome.MORE:
                return outcome, self._add(text[start:at], at)
            self._table = None
        match, free = END.find(text, at, is_last=False)
        self._add(text[start:free], free)
        if match is None:
            return Outcome.MORE, free
        if self._is_string:
            self.pieces.append('"')
        else:
            text = "".join(self._text).removeprefix("\n").removesuffix("\n")
            self.pieces.append(_json(text, self._kinds))
        return Outcome.WHOLE, match.end()

    def _add(self, text: str, end: int) -> int:
        """Add more of its text; return the index behind it."""
        self._text.append(text)
        if not self._is_string:
            return end
        ready = "".join(self._text)
        if self._is_fresh and ready:
            ready, self._is_fresh = ready.removeprefix("\n"), False
        self._text = ["\n"] if ready.endswith("\n") else []  # the last line break is not part of the value
        self.pieces.append(dumps(ready.removesuffix("\n"))[1:-1])
        return end


def _json(text: str, kinds: frozenset[str]) -> str:
    try:
        return dumps(value_of(text, kinds))
    except (ValueError, RecursionError):
        return dumps(text)
