"""Calls in JSON: where they end, piece by piece, and what they say."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import Any

from nanoengine.tools.marks import past_space

ENDS_A_STRING = re.compile(r'["\\]')
OUTSIDE = re.compile(r'["{}\[\]]|[^\s\d:,.+\-Etruefalsn]')
"""Of JSON outside a string: what opens or closes, and what cannot be."""

HEADER = re.compile(r"\s{0,8}([\w.\-]{1,128})(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\])?\s{0,8}(?=\{)")
MAX_HEADER_CHARS = 300

loads = json.JSONDecoder(strict=False).decode
"""Small models write a line's end into a string as it is; JSON that is told has it as it should be."""

NameAndArguments = tuple[str, str]
"""A name, and the JSON text of arguments."""


class Outcome(Enum):
    """What a text is, as far as it was read."""

    MORE = auto()
    """The beginning of a call."""
    WHOLE = auto()
    """All of it."""
    TEXT = auto()
    """No call."""


class CallReader(ABC):
    """Reads what stands behind the mark of a call, piece by piece. One for each call.

    Args:
        names: of the tools that there are; None: any may be called.
    """

    def __init__(self, names: Collection[str] | None):
        self.names = names

    @abstractmethod
    def scan(self, text: str, start: int, is_last: bool) -> tuple[Outcome, int]:
        """Read on from `start`: what it is, and up to where it was read. Where more is needed, the rest comes again with it: it
        must be short, so that a call costs no more than its length.
        """

    @abstractmethod
    def calls(self, text: str) -> list[NameAndArguments] | None:
        """What a whole text says, from behind the mark on; None: no call.

        Raises:
            ValueError, RecursionError: the same.
        """


class JsonEnd:
    """Looks for the end of an object or a list."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def find(self, text: str, at: int) -> tuple[Outcome, int]:
        """As `CallReader.scan`, and no character twice."""
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            match = (ENDS_A_STRING if self._in_string else OUTSIDE).search(text, at)
            if match is None:
                return Outcome.MORE, len(text)
            character, at = match[0], match.end()
            if character == "\\" and self._in_string:
                self._is_escaped = True
            elif character == '"':
                self._in_string = not self._in_string
            elif character in "{[":
                self._depth += 1
            elif character in "]}":
                self._depth -= 1
                if not self._depth:
                    return Outcome.WHOLE, at
            else:
                return Outcome.TEXT, at - 1
        return Outcome.MORE, at


class JsonCalls(CallReader):
    """An object that is a call, or a list of them."""

    def __init__(self, names: Collection[str] | None):
        super().__init__(names)
        self._end: JsonEnd | None = None

    def scan(self, text: str, start: int, is_last: bool) -> tuple[Outcome, int]:
        outcome, at = Outcome.MORE, start
        if self._end is None:
            at = past_space(text, at)
            if at < len(text):
                if text[at] not in "{[":
                    return Outcome.TEXT, at
                self._end = JsonEnd()
        if self._end is not None:
            outcome, at = self._end.find(text, at)
        return (Outcome.TEXT if is_last and outcome is Outcome.MORE else outcome), at

    def calls(self, text: str) -> list[NameAndArguments] | None:
        values = loads(text)
        found = [read_call(own, self.names) for own in (values if isinstance(values, list) else [values])]
        calls = [own for own in found if own is not None]
        return calls if calls and len(calls) == len(found) else None


class ItemCall(JsonCalls):
    """One call of a list, with what stands before it there."""

    def scan(self, text: str, start: int, is_last: bool) -> tuple[Outcome, int]:
        return super().scan(text, past_space(text, start, "[,") if self._end is None else start, is_last)

    def calls(self, text: str) -> list[NameAndArguments] | None:
        return super().calls(text[text.index("{") :])


class ArgsCalls(JsonCalls):
    """NAME[ARGS] and the arguments; or JSON without a name. [ARGS] may be missing."""

    _name = ""

    def scan(self, text: str, start: int, is_last: bool) -> tuple[Outcome, int]:
        if self._end is None:
            head = text[start : start + MAX_HEADER_CHARS]
            begun = head.lstrip()[:1]
            if (header := HEADER.match(head)) is not None:
                self._name, start = header[1], start + header.end()
            elif begun not in ("{", "["):
                if "{" in head or len(head) == MAX_HEADER_CHARS or is_last:
                    return Outcome.TEXT, start
                return Outcome.MORE, start
        return super().scan(text, start, is_last)

    def calls(self, text: str) -> list[NameAndArguments] | None:
        return arguments_of(self._name, text, self.names) if self._name else super().calls(text)


def arguments_of(name: str, text: str, names: Collection[str] | None) -> list[NameAndArguments] | None:
    """A call of a name that was told, whose arguments end a text."""
    found = read_call({"name": name, "arguments": text[text.find("{") :]}, names)
    return None if found is None else [found]


def read_call(value: Any, names: Collection[str] | None) -> NameAndArguments | None:
    """A call as models write one; None if it is none.

    Raises:
        ValueError, RecursionError: arguments that JSON does not have.
    """
    value = value.get("function", value) if isinstance(value, Mapping) and "name" not in value else value
    name = value.get("name") if isinstance(value, Mapping) else None
    if not isinstance(name, str) or (names is not None and name not in names):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = loads(arguments) if arguments.strip() else {}
    if arguments is None and names is not None:  # a known tool without arguments
        arguments = {}
    if not isinstance(arguments, Mapping):
        return None
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        text = json.dumps(arguments)
    return name, text
