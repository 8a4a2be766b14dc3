"""CallTeller: makes events of calls while they are read: the name first, then pieces of the arguments, then the whole call."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from nanoengine.features.tool_calls.json_text import loads


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call that comes.

    Args:
        index: of the call, from 0.
        name: of the tool, in the first piece of the call; None in all others.
        arguments: more of the JSON text of the arguments; may be empty.
    """

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call of a tool, behind its last piece. `arguments`: the JSON text of an object, which is all pieces joined."""

    index: int
    name: str
    arguments: str


class CallTeller:
    """Tells the calls of one answer.

    Args:
        most: see `answer_parser`.
        is_forced: a call that is equal to an earlier one is not told. While it may still become equal, it is held back.
    """

    def __init__(self, most: int | None, is_forced: bool):
        self.most, self.is_forced = most, is_forced
        self.has_repeated = False  # a call came that is equal to an earlier one
        self.num_whole = self._num_begun = 0
        self._seen: defaultdict[str, list[str]] = defaultdict(list)  # the arguments of forced calls by names, sorted
        self._name: str | None = None  # of the call that is read; None: there is none
        self._arguments: list[str] = []
        self._num_told = 0  # pieces of them that were told
        self._is_alike = False  # it may become equal to an earlier call

    def add(self, name: str, arguments: str) -> list[CallPiece]:
        """A piece of the call that is read; the first begins it."""
        if self._name is None:
            self._name, self._arguments, self._num_told, self._is_alike = name, [], 0, True
        if arguments or not self._arguments:
            self._arguments.append(arguments)
        if self._is_alike:
            begun, seen = "".join(self._arguments), self._seen[name]
            place = bisect_left(seen, begun)
            self._is_alike = place < len(seen) and seen[place].startswith(begun)
        return [] if self._is_alike else self._news()

    def _news(self) -> list[CallPiece]:
        """What is not told yet of the call that is read."""
        is_left_out = self.has_repeated or (self.most is not None and self.num_whole >= self.most)
        news, is_first = self._arguments[self._num_told :], not self._num_told
        if is_left_out or not news:
            return []
        self._num_told = len(self._arguments)
        self._num_begun += is_first
        return [CallPiece(self._num_begun - 1, self._name if is_first else None, "".join(news))]

    def end(self) -> list[CallPiece | Call]:
        """The call that is read is whole.

        Raises:
            ValueError, RecursionError: its arguments are no JSON, so it is no call.
        """
        assert self._name is not None
        name, arguments = self._name, "".join(self._arguments)
        loads(arguments, strict=True)
        if self.is_forced:
            self.has_repeated |= self._is_alike
            insort(self._seen[name], arguments)
        news = self._news()
        self._name = None
        if not self._num_told or self.has_repeated:
            return []
        self.num_whole += 1
        return [*news, Call(self._num_begun - 1, name, arguments)]

    def drop(self) -> None:
        """The call that is read is none."""
        self._name = None

    def resume(self) -> None:
        """All that came belongs to the prompt, but for the call that is read, which is told from its beginning."""
        self.num_whole = self._num_begun = self._num_told = 0
        self._seen.clear()


E = TypeVar("E")


def of_whole_calls(events: Iterable[E]) -> list[E]:
    """Events of a whole answer, without the pieces of calls that broke or were cut off."""
    events = list(events)
    whole = {event.index for event in events if isinstance(event, Call)}
    return [event for event in events if not isinstance(event, CallPiece) or event.index in whole]
