"""AnswerParser: the text of an answer, as it comes, to what it says: text, thoughts and calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nanoengine.tools.formats import END_OF_THOUGHT, THINK, ToolFormat

ENDS_A_STRING = re.compile(r'["\\]')
OUTSIDE = re.compile(r'["{}\[\]]|[^\s\d:,.+\-Etruefalsn]')
"""Of JSON outside a string: what opens or closes, and what cannot be."""

HEADER = re.compile(r"\s{0,8}([\w.\-]{1,128})(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\])?\s{0,8}(?=\{)")
MAX_HEADER_CHARS = 300

MAX_HEAD_CHARS = 1000

HARMONY_HEADS = ("<|channel|>", "<|start|>", "<|message|>", "to=")


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of what the user is told."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thinks before."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, whole. `index` counts from 0; `arguments` is the JSON text of an object."""

    index: int
    name: str
    arguments: str


Event = Text | Reasoning | Call


class Marks:
    """Finds the first of some texts in a text that is not all there yet."""

    def __init__(self, texts: Iterable[str]):
        found = sorted(set(texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, found)) or "(?!)")
        self._beginnings = {text[:size] for text in found for size in range(1, len(text))}
        self._most = max(map(len, found), default=1) - 1

    def find(self, text: str, is_last: bool, start: int = 0) -> tuple[re.Match[str] | None, int]:
        """The first mark from a place on, and up to where the text is free of marks, whatever follows."""
        match = self._pattern.search(text, start)
        held = len(text)
        if not is_last:
            sizes = range(min(self._most, len(text) - start), 0, -1)
            held -= next((size for size in sizes if text[-size:] in self._beginnings), 0)
        if match is None or match.start() >= held:
            return None, held
        return match, match.start()


class AnswerParser:
    """Reads one answer. However it is cut into pieces, it says the same; what is no call is text.

    Args:
        format: how the model writes calls; None: it does not.
        names: of the tools; a call of another is text. None: all names are known.
        thinks: the model may begin with a thought between <think> and </think>.
        is_thinking: the prompt has begun one.
        dropped: texts of special tokens that nobody wants to see.
        most: calls that are told; those behind them are left out.
    """

    def __init__(
        self,
        format: ToolFormat | None,
        names: Collection[str] | None = None,
        *,
        thinks: bool = False,
        is_thinking: bool = False,
        dropped: Iterable[str] = (),
        most: int | None = None,
    ):
        self.format, self.names, self.most = format, names, most
        self._begins = frozenset() if format is None else frozenset(format.begins or ["{"])
        is_harmony = format is not None and format.shape == "harmony"
        self._marks = Marks(format.marks if format is not None and is_harmony else (*self._begins, *dropped))
        self._end_of_thought = Marks([END_OF_THOUGHT])
        self._rest = ""  # what was not understood yet
        self._space = ""  # that is text if text follows
        self._is_fresh = is_thinking  # white space that comes first is left out
        self._kind: type[Text | Reasoning] = Reasoning if is_thinking else Text
        self._num_calls = 0
        self._told: set[type[Text | Reasoning]] = set()
        self._events: list[Event] = []
        self._state: Callable[[bool], bool] = self._read_text  # reads on; False: it needs more
        if is_harmony:
            self._state = self._read_head
        elif is_thinking or thinks:
            self._state = self._read_start
        self._begin_scan("")

    def push(self, text: str) -> list[Event]:
        """More of the answer: what is certain now."""
        self._rest += text
        return self._run(False)

    def finish(self) -> list[Event]:
        """The answer is over: the rest of it."""
        events = self._run(True)
        if self._space and not self._num_calls and self._kind is Text and not self._is_fresh:
            events.append(Text(self._space))
        return events

    def _run(self, is_last: bool) -> list[Event]:
        while self._state(is_last):
            pass
        events, self._events = self._events, []
        return events

    # ---- what is said

    def _say(self, size: int, before: str = "") -> None:
        """So many characters of the rest are of the kind that is read."""
        text, self._rest = before + self._rest[:size], self._rest[size:]
        text = self._space + (text.lstrip() if self._is_fresh else text)
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._events.append(self._kind(said))
            self._told.add(self._kind)
            self._is_fresh = False

    def _switch(self, kind: type[Text | Reasoning], state: Callable[[bool], bool]) -> bool:
        """What follows is of another kind, and white space between the two of neither. Two messages of a kind are two lines."""
        self._kind, self._is_fresh, self._state = kind, True, state
        self._space = "\n" if kind in self._told else ""
        return True

    # ---- text and thoughts

    def _read_start(self, is_last: bool) -> bool:
        """Some models write <think> though the prompt ends with it."""
        begun = self._rest.lstrip()
        if begun.startswith(THINK):
            self._rest = begun[len(THINK) :]
            return self._switch(Reasoning, self._read_thought)
        if not is_last and THINK.startswith(begun):
            return False
        self._state = self._read_thought if self._kind is Reasoning else self._read_text
        return True

    def _read_thought(self, is_last: bool) -> bool:
        mark, free = self._end_of_thought.find(self._rest, is_last)
        self._say(free)
        if mark is None:
            return False
        self._rest = self._rest[len(END_OF_THOUGHT) :]
        return self._switch(Text, self._read_text)

    def _read_text(self, is_last: bool) -> bool:
        mark, free = self._marks.find(self._rest, is_last)
        self._say(free)
        if mark is None:
            return False
        if mark[0] in self._begins:
            self._begin_scan("" if mark[0] == "{" else mark[0])
            self._state = self._read_call
            self._rest = self._rest[len(self._mark) :]
        else:
            self._rest = self._rest[len(mark[0]) :]
        return True

    # ---- calls

    def _begin_scan(self, mark: str) -> None:
        self._mark, self._name = mark, ""  # the name, where it stands before the arguments
        self._at = self._depth = 0  # up to where the JSON was read, and how deep it is there
        self._in_string = False

    def _read_call(self, is_last: bool) -> bool:
        """The mark is gone; the rest begins with what should be a call."""
        assert self.format is not None
        if not self._depth and not self._at:
            if self.format.shape == "args" and not self._name and (header := HEADER.match(self._rest)):
                self._name, self._at = header[1], header.end()
            else:
                self._at = len(self._rest) - len(self._rest.lstrip())
            begun = self._rest[self._at : self._at + 1]
            may_come = not begun or (self.format.shape == "args" and len(self._rest) < MAX_HEADER_CHARS)
            if begun not in ("{", "[") and may_come and "{" not in self._rest and not is_last:
                self._at = 0
                return False
            if begun not in ("{", "["):
                return self._no_call(self._at)
        end, is_broken = self._scan()
        if is_broken or (end is None and is_last):
            return self._no_call(self._at)
        if end is None:
            return False
        if not self._take(end):
            return self._no_call(end)
        if (
            Text not in self._told
        ):  # white space around a call is of the text only if there is text on both of its sides
            self._space, self._is_fresh = "", True
        self._state = self._read_end
        return True

    def _no_call(self, size: int) -> bool:
        """It is text, so far."""
        self._say(size, self._mark)
        self._state = self._read_text
        return True

    def _scan(self) -> tuple[int | None, bool]:
        """The end of the JSON, if it is there, and whether it can be none. What was read before is not read again."""
        while self._at < len(self._rest):
            match = (ENDS_A_STRING if self._in_string else OUTSIDE).search(self._rest, self._at)
            if match is None:
                self._at = len(self._rest)
                break
            character, self._at = match[0], match.end()
            if character == "\\":
                if self._at == len(self._rest):  # what it escapes is not there yet
                    self._at -= 1
                    break
                self._at += 1
            elif character == '"':
                self._in_string = not self._in_string
            elif character in "{[":
                self._depth += 1
            elif character in "]}":
                self._depth -= 1
                if not self._depth:
                    return self._at, False
            else:
                self._at -= 1
                return None, True
        return None, False

    def _take(self, size: int) -> bool:
        """Tell the calls that so many characters of the rest are, if they are any."""
        text = self._rest[:size]
        try:
            own = {"name": self._name, "arguments": text[text.find("{") :]}
            values = own if self._name else _loads(text)
            calls = [_call(own, self.names) for own in (values if isinstance(values, list) else [values])]
        except (ValueError, RecursionError):
            return False
        if not calls or None in calls:
            return False
        for name, arguments in filter(None, calls):
            if self.most is None or self._num_calls < self.most:
                self._events.append(Call(self._num_calls, name, arguments))
                self._num_calls += 1
        self._rest = self._rest[size:]
        return True

    def _read_end(self, is_last: bool) -> bool:
        """Behind a call: a mark, perhaps."""
        assert self.format is not None
        rest, end = self._rest.lstrip(" \n\r\t" + self.format.between), self.format.end
        if not is_last and (not rest or (rest != end and end.startswith(rest))):
            return False
        is_marked = bool(end) and rest.startswith(end)
        if not is_marked and not self._is_fresh:
            self._space += "".join(filter(str.isspace, self._rest[: len(self._rest) - len(rest)]))
        self._rest = rest[len(end) :] if is_marked else rest
        self._state = self._read_text
        return True

    # ---- harmony: messages, each with a head that says what it is (https://github.com/openai/harmony)

    def _read_head(self, is_last: bool) -> bool:
        begun = self._rest.lstrip()
        if not begun.startswith(HARMONY_HEADS):
            if not is_last and any(head.startswith(begun) for head in HARMONY_HEADS):
                return False
            self._state = self._read_body
            return True
        head, mark, rest = self._rest.partition("<|message|>")
        if len(head) > MAX_HEAD_CHARS + (0 if mark else len("<|message|>")):  # it is none, but text
            self._say(1)
            self._state = self._read_body
            return True
        if not mark:
            self._rest = "" if is_last else self._rest
            return False
        self._rest = rest
        if (to := re.search(r"to=(?:functions\.)?([\w.\-]+)", head)) is not None:
            self._begin_scan("")
            self._name = to[1]
            return self._switch(Text, self._read_harmony_call)
        return self._switch(Reasoning if "<|channel|>analysis" in head else Text, self._read_body)

    def _read_body(self, is_last: bool) -> bool:
        mark, free = self._marks.find(self._rest, is_last)
        self._say(free)
        return mark is not None and self._next_message(mark[0])

    def _read_harmony_call(self, is_last: bool) -> bool:
        mark, free = self._marks.find(self._rest, is_last, self._at)
        if mark is None and not is_last:
            self._at = free
            return False
        if not self._take(free):
            self._say(free)
        return mark is not None and self._next_message(mark[0])

    def _next_message(self, mark: str) -> bool:
        if mark not in HARMONY_HEADS:
            self._rest = self._rest[len(mark) :]
        return self._switch(Text, self._read_head)


_loads = json.JSONDecoder(strict=False).decode
"""Small models write a line's end into a string as it is; JSON that is told has it as it should be."""


def _call(value: Any, names: Collection[str] | None) -> tuple[str, str] | None:
    """Name and arguments of a call as models write one; None if it is none.

    Raises:
        ValueError, RecursionError: arguments that JSON does not have.
    """
    value = value.get("function", value) if isinstance(value, Mapping) and "name" not in value else value
    name = value.get("name") if isinstance(value, Mapping) else None
    if not isinstance(name, str) or (names is not None and name not in names):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _loads(arguments) if arguments.strip() else {}
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
