"""AnswerParser: the text of an answer, as it comes, to what it says: text, thoughts and calls of tools."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from nanoengine.tools.formats import ToolFormat
from nanoengine.tools.harmony import Harmony
from nanoengine.tools.marked import Marked
from nanoengine.tools.reading import Call, Event, Reading, Reasoning, Text

__all__ = ["AnswerParser", "Call", "Event", "Reasoning", "Text"]

REPEATED = "repeated call"
"""The stop reason of an answer that would go on with a call that it has made."""


class AnswerParser:
    """Reads one answer. However it is cut into pieces, it says the same; what is no call is text.

    Args:
        format: how the model writes calls; None: it does not.
        names: of the tools; a call of another is text. None: all names are known.
        thinks: the model may begin with a thought between <think> and </think>.
        is_thinking: the prompt has begun one.
        dropped: texts of special tokens that nobody wants to see.
        most: calls that are told; those behind them are left out.
        whole: names of tools of which a call may be all of the answer, as JSON in a fence or bare, whatever the format.
        schemas: of the arguments, by the names of tools: where a format writes no JSON, they say what a value is.
        is_forced: a grammar leaves nothing but calls. Those of a list are told one by one, and the answer ends with the first
            that repeats another, name and arguments: small models would go on so for ever.
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
        whole: Collection[str] = (),
        schemas: Mapping[str, Any] | None = None,
        is_forced: bool = False,
    ):
        self._reading: Reading
        if format is not None and format.shape == "harmony":
            self._reading = Harmony(names, most, whole)
        else:
            self._reading = Marked(
                format, names, schemas or {}, most, thinks, is_thinking, tuple(dropped), whole, is_forced
            )

    @property
    def num_held(self) -> int:
        """Characters that came, and are read again when more come."""
        return self._reading.num_held

    def push(self, text: str) -> list[Event]:
        """More of the answer: what is certain now."""
        return self._reading.push(text)

    def end(self, text: str) -> str | None:
        """As `push`, for who wants to know nothing but why the answer ends behind this text; None: it does not."""
        self._reading.has_repeated = False  # one before may not have ended it: there were too few tokens
        self.push(text)
        return REPEATED if self._reading.has_repeated else None

    def finish(self, is_cut: bool = False) -> list[Event]:
        """The answer is over: the rest of it. Of one that was cut off, a call that was begun is not told, nor its marks."""
        return self._reading.finish(is_cut)
