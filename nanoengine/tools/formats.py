"""Formats: how models write calls of tools. Which one a model was trained on shows in its chat template."""

from __future__ import annotations

from dataclasses import dataclass, replace

THINK, END_OF_THOUGHT = "<think>", "</think>"
"""What many models write around their thoughts."""


@dataclass(frozen=True, slots=True)
class Xml:
    """How a call is written whose values each have marks of their own. A string stands there as it is, all else as JSON.

    Args:
        name, key, value: what stands in front of and behind the name, a key, and a value.
        end: what stands behind the last value.
        pad: white space around a value that is no part of it.
        gap: what stands between two marks, as the model is made to write it; any white space is understood.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    pad: str = ""
    gap: str = "\n"

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (*self.name, *self.key, *self.value, self.end) if len(mark) > 1)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls.

    Args:
        name: of the format.
        signs: texts of a chat template, any of which says that its model writes calls so.
        begins: what stands before a call: the first is what the model is made to write, all are understood. None: a call is the
            JSON object itself.
        end: what stands behind a call, where the model says so.
        inner: white space between those and the call, as the model is made to write it.
        shape: "object": one call; "list": one list of calls; "args": NAME[ARGS] and the arguments; "xml": see `Xml`;
            "harmony": see `nanoengine/tools/harmony.py`.
        arguments: what the arguments are called.
        between: what stands between two calls.
        xml: of the shape of that name.
    """

    name: str
    signs: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()
    end: str = ""
    inner: str = ""
    shape: str = "object"
    arguments: str = "arguments"
    between: str = "\n"
    xml: Xml | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that must not be lost where they are special tokens."""
        if self.shape == "harmony":
            return HARMONY_MARKS
        return (
            *self.begins,
            *([self.end] if self.end else []),
            *(("[ARGS]", "[CALL_ID]") if self.shape == "args" else ()),
            *(() if self.xml is None else self.xml.marks),
        )


HARMONY_MARKS = tuple(f"<|{name}|>" for name in ("start", "channel", "message", "constrain", "end", "call", "return"))

HERMES = ToolFormat("hermes", ("<tool_call>",), ("<tool_call>",), "</tool_call>", "\n")

PLAIN = ToolFormat("json", between="; ")
"""A JSON object by itself: for templates that tell of tools, and have no sign of how the model is to call them."""

FUNCTION = Xml(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", pad="\n")
ARG_KEY = Xml(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "</tool_call>")
"""What ends the arguments ends the call, too."""

FORMATS = (
    ToolFormat("harmony", ("<|channel|>",), shape="harmony"),
    ToolFormat("mistral_args", ("[ARGS]",), ("[TOOL_CALLS]",), shape="args", between=""),
    ToolFormat("mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), shape="list"),
    ToolFormat("phi", ("<|/tool_call|>",), ("<|tool_call|>", "functools"), "<|/tool_call|>", shape="list", between=""),
    ToolFormat("granite", ("<|tool_call|>",), ("<|tool_call|>", "<tool_call>"), shape="list"),
    ToolFormat("functools", ("functools[",), ("functools",), shape="list"),
    ToolFormat(
        "seed",
        ("<seed:tool_call>",),
        ("<seed:tool_call>",),
        "</seed:tool_call>",
        "\n",
        shape="xml",
        xml=replace(FUNCTION, pad=""),
    ),
    ToolFormat("qwen3_coder", ("<parameter=",), ("<tool_call>",), "</tool_call>", "\n", shape="xml", xml=FUNCTION),
    ToolFormat(
        "glm47", ("</arg_key><arg_value>",), ("<tool_call>",), shape="xml", between="", xml=replace(ARG_KEY, gap="")
    ),
    ToolFormat("glm", ("<arg_key>",), ("<tool_call>",), shape="xml", xml=ARG_KEY),
    HERMES,
    ToolFormat("llama3", ("ipython", '"parameters"'), arguments="parameters", between="; "),
)
"""The most special first: templates have signs of several."""


def find_format(template: str) -> ToolFormat | None:
    """The format of a chat template; None if it has no sign of any."""
    return next((own for own in FORMATS if any(sign in template for sign in own.signs)), None)
