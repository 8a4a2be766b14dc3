"""Formats of tool calls. The chat template of a model shows the format of its training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

THINK, END_OF_THOUGHT = "<think>", "</think>"
"""The delimiters of a thought in many models."""


FUNCTION, END_OF_FUNCTION = "<function=", "</function>"
PARAMETER, END_OF_PARAMETER = "<parameter=", "</parameter>"
"""Delimiters of a call in XML: `<function=name>`, and `<parameter=name>` before each value. A string is written as it is,
any other value as JSON; a line break on each side is not part of the value.
"""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls.

    Args:
        name: of the format.
        signs: a chat template with one of these texts is of a model that writes calls in this format.
        begins: delimiters before a call: a parser accepts all, a grammar requires the first. Empty: a call is a bare JSON object.
        end: the delimiter behind a call; empty: none.
        inner: white space between the delimiters and the call, in grammars.
        shape: "object": one call; "list": one list of calls; "python": a list that may be written as Python has calls, although a
            grammar requires JSON; "args": NAME[ARGS] and the arguments; "xml": see `FUNCTION`;
            "harmony": see `nanoengine/features/tool_calls/harmony.py`.
        arguments: the key of the arguments.
        between: the text between two calls.
    """

    name: str
    signs: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()
    end: str = ""
    inner: str = ""
    shape: str = "object"
    arguments: str = "arguments"
    between: str = "\n"

    @property
    def is_list(self) -> bool:
        """Whether all calls of an answer are one list."""
        return self.shape in ("list", "python")

    @property
    def delimiters(self) -> tuple[str, ...]:
        """Texts that the parser needs, also where they are special tokens."""
        return tuple(filter(None, (*self.begins, self.end, *INNER_DELIMITERS.get(self.shape, ()))))


HARMONY_DELIMITERS = tuple(
    f"<|{name}|>" for name in ("start", "channel", "message", "constrain", "end", "call", "return")
)
INNER_DELIMITERS = {
    "args": ("[ARGS]", "[CALL_ID]"),
    "xml": (FUNCTION, END_OF_FUNCTION, PARAMETER, END_OF_PARAMETER),
    "harmony": HARMONY_DELIMITERS,
}
"""Delimiters in calls, by the shape of a format."""

HERMES = ToolFormat("hermes", ("<tool_call>",), ("<tool_call>",), "</tool_call>", "\n")

PLAIN = ToolFormat("json", between="; ")
"""A JSON object alone: for templates that know tools, and show no format."""

FORMATS = (
    ToolFormat("harmony", ("<|channel|>",), shape="harmony"),
    ToolFormat("mistral_args", ("[ARGS]",), ("[TOOL_CALLS]",), shape="args", between=""),
    ToolFormat("mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), shape="list"),
    ToolFormat("phi", ("<|/tool_call|>",), ("<|tool_call|>", "functools"), "<|/tool_call|>", shape="list", between=""),
    ToolFormat("granite", ("<|tool_call|>",), ("<|tool_call|>", "<tool_call>"), shape="list"),
    ToolFormat("functools", ("functools[",), ("functools",), shape="list"),
    ToolFormat(
        "lfm2",
        ("<|tool_list_start|>", "<|tool_call_start|>"),
        ("<|tool_call_start|>",),
        "<|tool_call_end|>",
        shape="python",
    ),
    ToolFormat("qwen3_coder", (PARAMETER,), ("<tool_call>",), "</tool_call>", "\n", shape="xml"),
    HERMES,
    ToolFormat("llama3", ("ipython", '"parameters"'), arguments="parameters", between="; "),
)
"""The most specific first: a template may have signs of several formats."""


def bare_delimiters(format: ToolFormat | None, names: Iterable[str]) -> list[str]:
    """Starts of XML calls without the delimiter of the format: models omit it."""
    return [f"{FUNCTION}{name}>" for name in names] if format is not None and format.shape == "xml" else []


def find_format(template: str) -> ToolFormat | None:
    """The format of a chat template; None if it has no sign of one."""
    return next((format for format in FORMATS if any(sign in template for sign in format.signs)), None)
