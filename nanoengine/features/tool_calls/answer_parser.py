"""answer_parser: a streaming parser from the text of an answer to events: text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from nanoengine.features.tool_calls.call_emitter import Call, CallPiece
from nanoengine.features.tool_calls.delimited import DelimitedParser
from nanoengine.features.tool_calls.formats import ToolFormat
from nanoengine.features.tool_calls.harmony import Harmony
from nanoengine.features.tool_calls.stream_parser import AnswerRules, Event, PlainText, Reasoning, StreamParser, Text

__all__ = ["Call", "CallPiece", "Event", "PlainText", "Reasoning", "StreamParser", "Text", "answer_parser"]


def answer_parser(format: ToolFormat | None, names: Collection[str] = (), **options: Any) -> StreamParser:
    """A parser for one answer; arguments as for `AnswerRules`. The joined events do not depend on the split of the text. All text
    outside of calls is emitted as text.
    """
    rules = AnswerRules(format=format, names=names, **options)
    if format is None and not (rules.thinks or rules.is_thinking or rules.dropped or rules.whole):
        return PlainText()
    return Harmony(rules) if format is not None and format.shape == "harmony" else DelimitedParser(rules)
