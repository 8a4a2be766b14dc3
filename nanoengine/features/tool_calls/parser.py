"""answer_parser: turns the text of an answer into events while it comes: text, thoughts and calls of tools."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from nanoengine.features.tool_calls.call_events import Call, CallPiece
from nanoengine.features.tool_calls.delimited import Marked
from nanoengine.features.tool_calls.formats import ToolFormat
from nanoengine.features.tool_calls.harmony import Harmony
from nanoengine.features.tool_calls.stream_parser import Event, PlainText, Reading, Reasoning, Text

__all__ = ["Call", "CallPiece", "Event", "PlainText", "Reading", "Reasoning", "Text", "answer_parser"]


def answer_parser(
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
    thought_calls: Collection[str] = (),
) -> Reading:
    """A parser for one answer. The events, joined, do not depend on how the text was cut into pieces; what is no call is text.

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
        thought_calls: marks of calls that may stand in a thought which nobody ends.
    """
    if format is None and not (thinks or is_thinking or dropped or whole):
        return PlainText()
    if format is not None and format.shape == "harmony":
        return Harmony(names, most, whole)
    return Marked(
        format, names, schemas or {}, most, thinks, is_thinking, tuple(dropped), whole, is_forced, thought_calls
    )
