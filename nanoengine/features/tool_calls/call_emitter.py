"""CallEmitter: events of a call while it is parsed: its name, then pieces of its arguments, then the whole call."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from nanoengine.features.tool_calls.json_text import loads


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call that is not complete yet.

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


class CallEmitter:
    """Events of the calls of one answer.

    Args:
        max_calls: see `AnswerRules`.
        is_forced: a call equal to an earlier one makes no event; while it may still become equal, its pieces wait.
    """

    def __init__(self, max_calls: int | None, is_forced: bool):
        self.max_calls, self.is_forced = max_calls, is_forced
        self.has_repeated = False  # a call was equal to an earlier one
        self.num_whole = self._num_begun = 0
        self._earlier: defaultdict[str, list[str]] = defaultdict(list)  # the arguments of forced calls by names, sorted
        self._name: str | None = None  # of the call that is read; None: there is none
        self._arguments: list[str] = []
        self._num_emitted = 0  # pieces of `_arguments` with an event
        self._is_alike = False  # it may become equal to an earlier call

    def add(self, name: str, arguments: str) -> list[CallPiece]:
        """Add a piece of the current call; the first piece starts the call."""
        if self._name is None:
            self._name, self._arguments, self._num_emitted, self._is_alike = name, [], 0, True
        if arguments or not self._arguments:
            self._arguments.append(arguments)
        if self._is_alike:
            begun, earlier = "".join(self._arguments), self._earlier[name]
            index = bisect_left(earlier, begun)
            self._is_alike = index < len(earlier) and earlier[index].startswith(begun)
        return [] if self._is_alike else self._unsent_pieces()

    def _unsent_pieces(self) -> list[CallPiece]:
        """The pieces of the current call that have no event yet."""
        is_left_out = self.has_repeated or (self.max_calls is not None and self.num_whole >= self.max_calls)
        pieces, is_first = self._arguments[self._num_emitted :], not self._num_emitted
        if is_left_out or not pieces:
            return []
        self._num_emitted = len(self._arguments)
        self._num_begun += is_first
        return [CallPiece(self._num_begun - 1, self._name if is_first else None, "".join(pieces))]

    def end(self) -> list[CallPiece | Call]:
        """End the current call.

        Raises:
            ValueError, RecursionError: its arguments are not JSON: it is not a call.
        """
        assert self._name is not None
        name, arguments = self._name, "".join(self._arguments)
        loads(arguments, strict=True)
        if self.is_forced:
            self.has_repeated |= self._is_alike
            insort(self._earlier[name], arguments)
        pieces = self._unsent_pieces()
        self._name = None
        if not self._num_emitted or self.has_repeated:
            return []
        self.num_whole += 1
        return [*pieces, Call(self._num_begun - 1, name, arguments)]

    def drop(self) -> None:
        """Forget the current call: it is not a call."""
        self._name = None

    def resume(self) -> None:
        """Treat complete calls as part of the prompt; the current call makes events from its first piece on."""
        self.num_whole = self._num_begun = self._num_emitted = 0
        self._earlier.clear()


E = TypeVar("E")


def without_incomplete_calls(events: Iterable[E]) -> list[E]:
    """The events of a complete answer without the pieces of incomplete calls."""
    events = list(events)
    whole = {event.index for event in events if isinstance(event, Call)}
    return [event for event in events if not isinstance(event, CallPiece) or event.index in whole]
