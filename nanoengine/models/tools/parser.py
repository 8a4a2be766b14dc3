"""AnswerParser: turns the text of an answer into events while it comes: text, thoughts and calls of tools."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from nanoengine.models.tools.formats import ToolFormat
from nanoengine.models.tools.harmony import Harmony
from nanoengine.models.tools.marked import Marked
from nanoengine.models.tools.reading import Call, Event, Reading, Reasoning, Text

__all__ = ["AnswerParser", "Call", "Event", "Reasoning", "Text"]

REPEATED = "repeated call"
"""The stop reason of an answer that repeats one of its calls."""


class AnswerParser:
    """Reads one answer. The events, joined, do not depend on how the text was cut into pieces; what is no call is text.

    Args:
        format: how the model writes calls; None: it does not.
        names: of the tools; a call of another is text. None: all names are known.
        thinks: the model may begin with a thought between <think> and </think>.
        is_thinking: the prompt has begun one.
        dropped: texts of special tokens, which are left out.
        most: the most calls; later ones are left out.
        whole: names of tools whose call may be the whole answer, as JSON in a fence or bare, in any format.
        schemas: of the arguments, by the names of tools: a format without JSON needs them for the types of values.
        is_forced: a grammar allows only calls. Calls of a list are events one by one, and the answer ends with the first call
            that is equal to an earlier one: small models would repeat it for ever.
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
        """The number of characters that are read again when more come."""
        return self._reading.num_held

    def push(self, text: str) -> list[Event]:
        """Read more of the answer; return the events that are certain now."""
        return self._reading.push(text)

    def end(self, text: str) -> str | None:
        """As `push`, without events: the reason why the answer ends behind this text; None: it does not end."""
        self._reading.has_repeated = False  # one before may not have ended it: there were too few tokens
        self.push(text)
        return REPEATED if self._reading.has_repeated else None

    def finish(self, is_cut: bool = False) -> list[Event]:
        """The last events of an answer. If it was cut off by a limit, a call that was begun is left out, with its marks."""
        return self._reading.finish(is_cut)
