"""JSON calls: readers of the arguments and the end of a call in streamed text."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import Any

from nanoengine.features.tool_calls.delimiters import past_space
from nanoengine.features.tool_calls.json_text import JsonPieces, dumps, loads

ENDS_A_STRING = re.compile(r"""["'\\]""")
OUTSIDE = re.compile(r'["{}\[\]]|[^\s\d:,.+\-Etruefalsn]')
"""Outside of strings in JSON: characters that open or close something, and characters that JSON does not have."""

HEADER = re.compile(r"\s{0,8}([\w.\-]{1,128})(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\])?\s{0,8}(?=\{)")
OBJECT = re.compile(
    r'\{\s{0,8}"name"\s{0,8}:\s{0,8}"([\w.\-]{1,128})"\s{0,8},'
    r'\s{0,8}"(?:arguments|parameters)"\s{0,8}:\s{0,8}(?=\{)'
)
"""The beginning of the object of a call, up to its arguments."""
NAME = '{"name":"'
MAX_HEADER_CHARS = 300

NameAndArguments = tuple[str, str]
"""The name of a tool, and the JSON text of its arguments."""


class Outcome(Enum):
    """The result of reading a part of a text."""

    MORE = auto()
    """It may be the beginning of a call: more text is needed."""
    WHOLE = auto()
    """It is a whole call."""
    TEXT = auto()
    """It is no call."""


class CallReader(ABC):
    """Incremental reader of one call; its text starts behind the delimiter.

    Args:
        names: of the tools.
    """

    def __init__(self, names: Collection[str]):
        self.names = names
        self.name: str | None = None
        """The tool of the call once it is certain. None: not certain yet, or only the complete text shows it."""
        self.pieces: list[str] = []
        """Pieces of the JSON text of its arguments; a caller that consumes them clears the list."""

    @abstractmethod
    def scan(self, text: str, start: int, is_last: bool) -> tuple[Outcome, int]:
        """Read on from `start`; return the outcome and the end of the text that was read. On `MORE`, the next call receives
        the text behind that end again, and more: it must be short, or the total time would be quadratic. With `is_last` there
        is no next call.
        """

    def calls(self, text: str) -> list[NameAndArguments] | None:
        """The calls of a complete text without a `name`; None: it is not a call.

        Raises:
            ValueError, RecursionError: it is not a call.
        """
        return None


class JsonEnd:
    """Searches for the end of a JSON object or list in streamed text.

    Args:
        outside: pattern of brackets, quotes and invalid characters outside of strings. None: JSON's.
        quotes: characters that start a string.
        depth: open objects and lists.
    """

    def __init__(self, outside: re.Pattern[str] | None = None, quotes: str = '"', depth: int = 0):
        self._outside, self._quotes, self._depth = outside or OUTSIDE, quotes, depth
        self._quote = ""  # of the string that is open
        self._is_escaped = False

    def scan(self, text: str, at: int, is_last: bool = False) -> tuple[Outcome, int]:
        """As `CallReader.scan`; no character is read twice."""
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            match = (ENDS_A_STRING if self._quote else self._outside).search(text, at)
            if match is None:
                return Outcome.MORE, len(text)
            character, at = match[0], match.end()
            if self._quote:
                self._is_escaped = character == "\\"
                self._quote = "" if character == self._quote else self._quote
            elif character in self._quotes:
                self._quote = character
            elif character in "{[":
                self._depth += 1
            elif character in "]}":
                self._depth -= 1
                if not self._depth:
                    return Outcome.WHOLE, at
            else:
                return Outcome.TEXT, at - 1
        return Outcome.MORE, at


class Arguments(CallReader):
    """The arguments of a call whose name is known. Args: the name, and whether the object of the call ends behind them."""

    def __init__(self, name: str, is_inside: bool = False):
        super().__init__(())
        self.tool = name
        self._end, self._rest = JsonEnd(), JsonEnd(depth=1) if is_inside else None
        self._escaped = JsonPieces()
        self._has_begun = self._has_ended = False

    def scan(self, text: str, start: int, is_last: bool) -> tuple[Outcome, int]:
        outcome, at = Outcome.MORE, start
        if not self._has_begun:
            at = past_space(text, start)
            self._has_begun = at < len(text)
            if self._has_begun and text[at] != "{":
                return Outcome.TEXT, at
            self.name = self.tool if self._has_begun else None
        if not self._has_ended:
            start = at
            outcome, at = self._end.scan(text, at)
            self.pieces.append(self._escaped.push(text[start:at]))
            self._has_ended = outcome is Outcome.WHOLE
        if self._has_ended and self._rest is not None:
            outcome, at = self._rest.scan(text, at)
            # The call is whole with its arguments: some models forget the last bracket.
            return (Outcome.MORE if outcome is Outcome.MORE and not is_last else Outcome.WHOLE), at
        return outcome, at


class JsonCalls(CallReader):
    """An object that is a call, or a list of them."""

    def __init__(self, names: Collection[str]):
        super().__init__(names)
        self._body: Arguments | JsonEnd | None = None  # None: it has not begun

    def scan(self, text: str, start: int, is_last: bool) -> tuple[Outcome, int]:
        at = start
        if self._body is None:
            at = past_space(text, start)
            if at == len(text):
                return Outcome.MORE, at
            if text[at] not in "{[":
                return Outcome.TEXT, at
            head = OBJECT.match(text, at)
            if head is not None and head[1] in self.names:
                self._body = self._arguments(head[1], is_inside=True)
                at = head.end()
            elif not is_last and self._may_be_head(text[at : at + MAX_HEADER_CHARS]):
                return Outcome.MORE, at
            else:
                self._body = self.new_end()
        return self._body.scan(text, at, is_last)

    def _arguments(self, name: str, *, is_inside: bool) -> Arguments:
        arguments = Arguments(name, is_inside)
        self.name, self.pieces = name, arguments.pieces
        return arguments

    def _may_be_head(self, text: str) -> bool:
        """Whether more text may turn this one into a match of `OBJECT` with the name of a tool."""
        head = "".join(text.split())
        name, quote, rest = head[len(NAME) :].partition('"')
        if not NAME.startswith(head[: len(NAME)]) or len(text) >= MAX_HEADER_CHARS:
            return False
        if quote:
            return name in self.names and any(key.startswith(rest) for key in (',"arguments":{', ',"parameters":{'))
        return any(tool.startswith(name) for tool in self.names)

    def new_end(self) -> JsonEnd:
        return JsonEnd()

    def calls(self, text: str) -> list[NameAndArguments] | None:
        values = loads(text)
        results = [read_call(value, self.names) for value in (values if isinstance(values, list) else [values])]
        calls = [call for call in results if call is not None]
        return calls if calls and len(calls) == len(results) else None


class ItemCall(JsonCalls):
    """One call of a list, with the bracket or comma in front of it."""

    def scan(self, text: str, start: int, is_last: bool) -> tuple[Outcome, int]:
        return super().scan(text, past_space(text, start, "[,") if self._body is None else start, is_last)

    def calls(self, text: str) -> list[NameAndArguments] | None:
        return super().calls(text[text.index("{") :])


class ArgsCalls(JsonCalls):
    """NAME[ARGS] and the arguments; or JSON without a name. [ARGS] may be missing."""

    def scan(self, text: str, start: int, is_last: bool) -> tuple[Outcome, int]:
        if self._body is None:
            head = text[start : start + MAX_HEADER_CHARS]
            begun = head.lstrip()[:1]
            if (header := HEADER.match(head)) is not None:
                start += header.end()
                if header[1] in self.names:
                    self._body = self._arguments(header[1], is_inside=False)
                else:  # with such a name in front, the whole is no JSON
                    self._body = self.new_end()
            elif begun not in ("{", "["):
                if "{" in head or len(head) == MAX_HEADER_CHARS or is_last:
                    return Outcome.TEXT, start
                return Outcome.MORE, start
        return super().scan(text, start, is_last)


def read_call(value: Any, names: Collection[str]) -> NameAndArguments | None:
    """The call of one of these tools that a JSON value is, in the forms that models write; None: it is no call.

    Raises:
        ValueError, RecursionError: arguments that JSON does not have.
    """
    value = value.get("function", value) if isinstance(value, Mapping) and "name" not in value else value
    name = value.get("name") if isinstance(value, Mapping) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = loads(arguments) if arguments.strip() else {}
    if arguments is None:  # a tool without arguments
        arguments = {}
    if not isinstance(arguments, Mapping):
        return None
    return name, dumps(arguments)
