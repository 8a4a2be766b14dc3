"""StreamParser: from streamed text to events: text, reasoning and calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanoengine.features.tool_calls.call_emitter import Call, CallEmitter, CallPiece
from nanoengine.features.tool_calls.delimiters import past_space
from nanoengine.features.tool_calls.formats import ToolFormat
from nanoengine.features.tool_calls.json_calls import CallReader, NameAndArguments, Outcome
from nanoengine.features.tool_calls.single_call import SingleCallAnswer


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


Event = Text | Reasoning | CallPiece | Call

REPEATED = "repeated call"
"""The stop reason of an answer that repeats one of its calls."""

State = Callable[[bool], bool]
"""A state's function: reads a part of the text; False: it needs more. Argument: whether the text is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """The form of the answers to a prompt.

    Args:
        format: of the model's calls; None: it makes none.
        names: of the tools; a call of another name is text.
        thinks: the model may begin with a thought between <think> and </think>.
        is_thinking: the prompt has begun a thought.
        dropped: texts of special tokens to remove.
        max_calls: limit of the number of calls; later ones are dropped.
        whole: names of tools whose call may be the whole answer, as JSON in a fence or bare, in any format.
        schemas: of the arguments, by the names of tools: a format without JSON needs them for the types of values.
        is_forced: a grammar allows only calls. Calls of a list are events one by one, and the answer ends with the first call
            that is equal to an earlier one: small models would repeat it for ever.
        thought_calls: delimiters of calls that may follow a thought without an end.
    """

    format: ToolFormat | None = None
    names: Collection[str] = ()
    thinks: bool = False
    is_thinking: bool = False
    dropped: Collection[str] = ()
    max_calls: int | None = None
    whole: Collection[str] = ()
    schemas: Mapping[str, Any] = field(default_factory=dict)
    is_forced: bool = False
    thought_calls: Collection[str] = ()


class StreamParser:
    """State machine over streamed text: `_state` reads a part and sets the next state. `is_bare`: see `SingleCallAnswer`."""

    _state: State
    _read_rest: State
    """The state of an answer that is not a single call."""

    def __init__(self, rules: AnswerRules, *, is_bare: bool = True):
        self._rules, self._is_bare = rules, is_bare
        self._emitter = CallEmitter(rules.max_calls, rules.is_forced)
        self._single_call: SingleCallAnswer | None = None
        self._text, self._at = "", 0  # the text, and the end of the part that was read
        self._space: list[str] = []  # white space that is emitted if more text follows
        self._is_fresh = False  # white space at the start is dropped
        self._kind: type[Text | Reasoning] = Text
        self._emitted: set[type[Text | Reasoning]] = set()
        self._is_cut = False  # the text ends by a limit: an incomplete call is dropped
        self._call_text: list[str] = []  # the text of the current call
        self._events: list[Event] = []

    @property
    def num_held(self) -> int:
        """Characters that are read again with the next piece."""
        return len(self._text) - self._at

    def read(self, text: str, ended: str | None) -> list[Event]:
        """The events of the next piece of text. `ended`: the finish reason if the text ends here; then all text is emitted."""
        return [*self.push(text), *(self.finish(ended == "length") if ended else ())]

    def resume(self, text: str) -> None:
        """Read the start of the answer from the prompt; its events are not emitted."""
        self.push(text)
        self._emitter.resume()

    def push(self, text: str) -> list[Event]:
        """Read more of the answer; return the events that are certain now."""
        self._text, self._at = self._text[self._at :] + text, 0
        return self._run(False)

    def end(self, text: str) -> str | None:
        """As `push`, without events: the reason why the answer ends behind this text; None: it does not end."""
        self._emitter.has_repeated = False  # an earlier one may not have ended the answer: `min_tokens`
        self.push(text)
        return REPEATED if self._emitter.has_repeated else None

    def finish(self, is_cut: bool = False) -> list[Event]:
        """The last events of an answer. If a limit cut it off, an incomplete call is dropped with its delimiters."""
        self._is_cut = is_cut
        events = self._run(True)
        if self._space and not self._emitter.num_whole and self._kind is Text and not self._is_fresh:
            events.append(Text("".join(self._space)))
        return events

    def _run(self, is_last: bool) -> list[Event]:
        while self._state(is_last):
            pass
        events, self._events = self._events, []
        return events

    def _consume(self, end: int) -> str:
        """Advance to `end`; return the text before it."""
        text, self._at = self._text[self._at : end], end
        return text

    def _emit_text(self, text: str) -> None:
        text = text.lstrip() if self._is_fresh else text
        said = text.rstrip()
        if said:
            self._events.append(self._kind("".join(self._space) + said))
            self._emitted.add(self._kind)
            self._is_fresh = False
            self._space.clear()
        if len(said) < len(text):
            self._space.append(text[len(said) :])

    def _read_single_call(self, is_last: bool) -> bool:
        """Read an answer that may be a single call; otherwise read it from its start in `_read_rest`."""
        if self._single_call is None:
            self._emit_text(self._consume(past_space(self._text, self._at)))
            begun = self._text[self._at : self._at + 1]
            if not self._rules.whole or begun not in ("`", "{"):
                self._state = self._read_rest if begun or not self._rules.whole else self._state
                return bool(begun)
            self._single_call = SingleCallAnswer(self._rules.whole, self._is_bare, self._rules.dropped)
        answer, text = self._single_call, self._consume(len(self._text))
        if answer.push(text) and not is_last:
            return False
        self._state, self._single_call = self._read_rest, None
        if is_last and self._emit_calls(lambda _: answer.calls(), ""):
            self._space.clear()
        else:
            self._text, self._at = answer.text, 0
        return True

    def _switch(self, kind: type[Text | Reasoning], state: State) -> bool:
        """Change the kind of the text. White space between kinds is dropped; messages of one kind are joined by a line break."""
        self._kind, self._is_fresh, self._state = kind, True, state
        self._space = ["\n"] if kind in self._emitted else []
        return True

    def _emit_calls(self, calls: Callable[[str], list[NameAndArguments] | None], text: str) -> bool:
        """Emit the calls of a complete text; False: it is not a call."""
        try:
            complete = calls(text)
        except (ValueError, RecursionError):
            return False
        for name, arguments in complete or ():
            self._events += self._emitter.add(name, arguments)
            self._end_call()
        return complete is not None

    def _end_call(self) -> bool:
        """Emit the end of the current call; False: it is not a call."""
        try:
            self._events += self._emitter.end()
        except (ValueError, RecursionError):
            self._emitter.drop()
            return False
        return True

    def _scan(self, reader: CallReader, text: str, is_last: bool, *, is_doubtful: bool = False) -> Outcome:
        """Read on with a reader, and emit the certain part of a call. The outcome is WHOLE if calls were emitted.

        Args:
            reader: of a call; its text is added to `_call_text`.
            text: up to the end of the call.
            is_last: the text is complete.
            is_doubtful: nothing of a call is emitted before it is complete.
        """
        outcome, end = reader.scan(text, self._at, is_last)
        if is_last and outcome is Outcome.MORE:
            outcome, end = Outcome.TEXT, len(text)
        self._call_text.append(self._consume(end))
        if reader.name is None:
            if outcome is Outcome.WHOLE and not self._emit_calls(reader.calls, "".join(self._call_text)):
                return Outcome.TEXT
            return outcome
        if outcome is Outcome.WHOLE or not is_doubtful:
            self._events += self._emitter.add(reader.name, "".join(reader.pieces))
            reader.pieces.clear()
        if outcome is Outcome.WHOLE and not self._end_call():
            return Outcome.TEXT
        if outcome is Outcome.TEXT:
            self._emitter.drop()
        return outcome


class PlainText(StreamParser):
    """Parser of an answer that is plain text."""

    def __init__(self) -> None:
        super().__init__(AnswerRules())

    def push(self, text: str) -> list[Event]:
        return [Text(text)] if text else []

    def finish(self, is_cut: bool = False) -> list[Event]:
        return []
