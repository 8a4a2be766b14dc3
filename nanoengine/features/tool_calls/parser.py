"""answer_parser: a streaming parser from the text of an answer to events: text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from nanoengine.features.tool_calls.call_events import Call, CallPiece
from nanoengine.features.tool_calls.delimited import DelimitedParser
from nanoengine.features.tool_calls.formats import ToolFormat
from nanoengine.features.tool_calls.harmony import Harmony
from nanoengine.features.tool_calls.stream_parser import Event, PlainText, Reasoning, StreamParser, Text

__all__ = ["Call", "CallPiece", "Event", "PlainText", "Reasoning", "StreamParser", "Text", "answer_parser"]


def answer_parser(
    format: ToolFormat | None,
    names: Collection[str] | None = None,
    *,
    thinks: bool = False,
    is_thinking: bool = False,
    dropped: Iterable[str] = (),
    max_calls: int | None = None,
    whole: Collection[str] = (),
    schemas: Mapping[str, Any] | None = None,
    is_forced: bool = False,
    thought_calls: Collection[str] = (),
) -> StreamParser:
    """A parser for one answer. The joined events do not depend on how the text was split; text that is not a call stays text.

    Args:
        format: of the model's calls; None: it makes none.
        names: of the tools; a call of another name is text. None: every name is valid.
        thinks: the model may begin with a thought between <think> and </think>.
        is_thinking: the prompt has begun one.
        dropped: texts of special tokens to remove.
        max_calls: limit of the number of calls; later ones are dropped.
        whole: names of tools whose call may be the whole answer, as JSON in a fence or bare, in any format.
        schemas: of the arguments, by the names of tools: a format without JSON needs them for the types of values.
        is_forced: a grammar allows only calls. Calls of a list are events one by one, and the answer ends with the first call
            that is equal to an earlier one: small models would repeat it for ever.
        thought_calls: delimiters of calls that may follow a thought without an end.
    """
    if format is None and not (thinks or is_thinking or dropped or whole):
        return PlainText()
    if format is not None and format.shape == "harmony":
        return Harmony(names, max_calls, whole)
    return DelimitedParser(
        format, names, schemas or {}, max_calls, thinks, is_thinking, tuple(dropped), whole, is_forced, thought_calls
    )
