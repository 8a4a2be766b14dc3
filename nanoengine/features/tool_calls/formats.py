"""Formats: how models write calls of tools. The chat template of a model shows the format that it was trained with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

THINK, END_OF_THOUGHT = "<think>", "</think>"
"""The marks of many models around their thoughts."""


FUNCTION, END_OF_FUNCTION = "<function=", "</function>"
PARAMETER, END_OF_PARAMETER = "<parameter=", "</parameter>"
"""Marks of a call in XML: `<function=name>`, and each value behind `<parameter=name>`. A string is written as it is, any other
value as JSON, and all of them with a line break on both sides that is no part of the value.
"""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls.

    Args:
        name: of the format.
        signs: a chat template with one of these texts is of a model that writes calls in this format.
        begins: marks in front of a call: a parser takes all, a grammar asks for the first. Empty: a call is a JSON object alone.
        end: the mark behind a call; empty: there is none.
        inner: white space between the marks and the call, in grammars.
        shape: "object": one call; "list": one list of calls; "python": a list that may be written as Python has calls, although a
            grammar asks for JSON; "args": NAME[ARGS] and the arguments; "xml": see `FUNCTION`;
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
    def marks(self) -> tuple[str, ...]:
        """Texts that the parser needs, also where they are special tokens."""
        if self.shape == "harmony":
            return HARMONY_MARKS
        return (
            *self.begins,
            *([self.end] if self.end else []),
            *(("[ARGS]", "[CALL_ID]") if self.shape == "args" else ()),
            *((FUNCTION, END_OF_FUNCTION, PARAMETER, END_OF_PARAMETER) if self.shape == "xml" else ()),
        )


HARMONY_MARKS = tuple(f"<|{name}|>" for name in ("start", "channel", "message", "constrain", "end", "call", "return"))

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
"""The most special first: a template may have signs of several formats."""


def bare_marks(format: ToolFormat | None, names: Iterable[str]) -> list[str]:
    """Beginnings of calls of some tools without the mark of the format: models of calls in XML forget it."""
    return [f"{FUNCTION}{name}>" for name in names] if format is not None and format.shape == "xml" else []


def find_format(template: str) -> ToolFormat | None:
    """The format of a chat template; None if it has no sign of any."""
    return next((own for own in FORMATS if any(sign in template for sign in own.signs)), None)
