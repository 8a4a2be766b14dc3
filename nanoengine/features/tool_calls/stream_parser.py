"""Reading: turns text that comes in pieces into events: texts, thoughts and calls."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from nanoengine.features.tool_calls.call_events import Call, CallPiece, CallTeller
from nanoengine.features.tool_calls.delimiters import past_space
from nanoengine.features.tool_calls.json_calls import CallReader, NameAndArguments, Outcome
from nanoengine.features.tool_calls.single_call import WholeCall


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's thoughts."""

    text: str


Event = Text | Reasoning | CallPiece | Call

REPEATED = "repeated call"
"""The stop reason of an answer that repeats one of its calls."""

State = Callable[[bool], bool]
"""Reads a part of the text; False: it needs more. The argument: whether no more text will come."""


class Reading:
    """A state machine: `_state` reads a part of the text, and sets the state that reads the next part.

    Args:
        most: the most calls; later ones are left out.
        whole, dropped, is_forced: see `answer_parser`.
        is_bare: see `WholeCall`.
    """

    _state: State
    _read_rest: State
    """The state that reads an answer with more than one call alone."""

    def __init__(
        self,
        most: int | None,
        whole: Collection[str] = (),
        dropped: Collection[str] = (),
        *,
        is_bare: bool = True,
        is_forced: bool = False,
    ):
        self._teller = CallTeller(most, is_forced)
        self._whole, self._dropped, self._is_bare = whole, dropped, is_bare
        self._whole_call: WholeCall | None = None
        self._text, self._at = "", 0  # the text, and the place up to which it was read
        self._space: list[str] = []  # white space that belongs to the text if more text follows
        self._is_fresh = False  # white space at the beginning is left out
        self._kind: type[Text | Reasoning] = Text
        self._told: set[type[Text | Reasoning]] = set()
        self._is_cut = False  # the text ends by a limit: a call that was begun is left out
        self._held: list[str] = []  # the text of the call that is read
        self._events: list[Event] = []

    @property
    def num_held(self) -> int:
        """The number of characters that are read again when more come."""
        return len(self._text) - self._at

    def read(self, text: str, ended: str | None) -> list[Event]:
        """The events of the next piece of text. `ended`: the finish reason if the text ends here; nothing is held back then."""
        return [*self.push(text), *(self.finish(ended == "length") if ended else ())]

    def resume(self, text: str) -> None:
        """Read what the prompt has of the answer: its events are known."""
        self.push(text)
        self._teller.resume()

    def push(self, text: str) -> list[Event]:
        """Read more of the answer; return the events that are certain now."""
        self._text, self._at = self._text[self._at :] + text, 0
        return self._run(False)

    def end(self, text: str) -> str | None:
        """As `push`, without events: the reason why the answer ends behind this text; None: it does not end."""
        self._teller.has_repeated = False  # one before may not have ended it: there were too few tokens
        self.push(text)
        return REPEATED if self._teller.has_repeated else None

    def finish(self, is_cut: bool = False) -> list[Event]:
        """The last events of an answer. If it was cut off by a limit, a call that was begun is left out, with its marks."""
        self._is_cut = is_cut
        events = self._run(True)
        if self._space and not self._teller.num_whole and self._kind is Text and not self._is_fresh:
            events.append(Text("".join(self._space)))
        return events

    def _run(self, is_last: bool) -> list[Event]:
        while self._state(is_last):
            pass
        events, self._events = self._events, []
        return events

    def _read(self, end: int) -> str:
        """The text up to a place, which is read now."""
        text, self._at = self._text[self._at : end], end
        return text

    def _say(self, text: str) -> None:
        text = text.lstrip() if self._is_fresh else text
        said = text.rstrip()
        if said:
            self._events.append(self._kind("".join(self._space) + said))
            self._told.add(self._kind)
            self._is_fresh = False
            self._space.clear()
        if len(said) < len(text):
            self._space.append(text[len(said) :])

    def _read_whole(self, is_last: bool) -> bool:
        """Read an answer that may be one call alone; if it is not, read it from its beginning in another state."""
        if self._whole_call is None:
            self._say(self._read(past_space(self._text, self._at)))
            begun = self._text[self._at : self._at + 1]
            if not self._whole or begun not in ("`", "{"):
                self._state = self._read_rest if begun or not self._whole else self._state
                return bool(begun)
            self._whole_call = WholeCall(self._whole, self._is_bare, self._dropped)
        own, text = self._whole_call, self._read(len(self._text))
        if own.push(text) and not is_last:
            return False
        self._state, self._whole_call = self._read_rest, None
        if is_last and self._tell(lambda _: own.calls(), ""):
            self._space.clear()
        else:
            self._text, self._at = own.text, 0
        return True

    def _switch(self, kind: type[Text | Reasoning], state: State) -> bool:
        """Change the kind of the text. White space between kinds is left out; messages of one kind have a line break between."""
        self._kind, self._is_fresh, self._state = kind, True, state
        self._space = ["\n"] if kind in self._told else []
        return True

    def _tell(self, calls: Callable[[str], list[NameAndArguments] | None], text: str) -> bool:
        """Add the calls of a whole text to the events; False: it is no call."""
        try:
            found = calls(text)
        except (ValueError, RecursionError):
            return False
        for name, arguments in found or ():
            self._events += self._teller.add(name, arguments)
            self._end_call()
        return found is not None

    def _end_call(self) -> bool:
        """Add the end of the call that is read to the events; False: it is no call."""
        try:
            self._events += self._teller.end()
        except (ValueError, RecursionError):
            self._teller.drop()
            return False
        return True

    def _scan(self, reader: CallReader, text: str, is_last: bool, *, is_doubtful: bool = False) -> Outcome:
        """Read on with a reader, and add to the events what is certain of a call. The outcome is WHOLE if calls were told.

        Args:
            reader: of a call; the text that it read is added to `_held`.
            text: up to the place where it must stop.
            is_last: no more text will come.
            is_doubtful: nothing is told of a call before it is whole.
        """
        outcome, end = reader.scan(text, self._at, is_last)
        self._held.append(self._read(end))
        if reader.name is None:
            if outcome is Outcome.WHOLE and not self._tell(reader.calls, "".join(self._held)):
                return Outcome.TEXT
            return outcome
        if outcome is Outcome.WHOLE or not is_doubtful:
            self._events += self._teller.add(reader.name, "".join(reader.pieces))
            reader.pieces.clear()
        if outcome is Outcome.WHOLE and not self._end_call():
            return Outcome.TEXT
        if outcome is Outcome.TEXT:
            self._teller.drop()
        return outcome


class PlainText(Reading):
    """Reads an answer that is text and nothing else."""

    def __init__(self) -> None:
        super().__init__(None)

    def push(self, text: str) -> list[Event]:
        return [Text(text)] if text else []

    def finish(self, is_cut: bool = False) -> list[Event]:
        return []
