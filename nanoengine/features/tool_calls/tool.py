"""Tool and Choice: a function that a model may call, and the `tool_choice` of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoengine.core.errors import InvalidPrompt, InvalidSamplingParams, shown
from nanoengine.depth import MAX_DEPTH, is_nested_too_deeply

MAX_TOOLS = 512
MAX_NAME_CHARS = 128


@dataclass(frozen=True, slots=True)
class Tool:
    """A function.

    Args:
        name: of the function.
        parameters: the JSON schema of its arguments, an object.
        is_strict: a grammar holds the arguments to the schema.
        field: of the request that holds the schema, for errors.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool
    field: str = "tools"


@dataclass(frozen=True, slots=True)
class Choice:
    """The tools that an answer may call.

    Args:
        tools: that may be called.
        is_forced: the answer must call one.
        is_off: the answer makes no call; text that looks like a call is text.
        max_calls: limit of the calls of one answer; None: no limit.
    """

    tools: tuple[Tool, ...]
    is_forced: bool = False
    is_off: bool = False
    max_calls: int | None = None


def read_tools(tables: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    """The tools of a request: {"type": "function", "function": {"name": ..., "parameters": {...}, "strict": ...}}.

    Raises:
        InvalidPrompt: a value that is no tool, has no name or the name of another, or is too deep.
    """
    if tables is not None and not isinstance(tables, list | tuple):
        raise InvalidPrompt("tools", f" must be a list of JSON schemas of functions, not {shown(tables)}")
    if tables is not None and len(tables) > MAX_TOOLS:
        raise InvalidPrompt("tools", f" holds {len(tables)} functions: at most {MAX_TOOLS} can be")
    tools: dict[str, Tool] = {}
    for index, table in enumerate(tables or ()):
        function = table.get("function", table) if isinstance(table, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if function is None or not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS or name in tools:
            raise InvalidPrompt(
                "tools",
                f" holds {shown(table)}: a tool is a table, the JSON schema of a function, with a unique name",
            )
        if is_nested_too_deeply(table):
            raise InvalidPrompt("tools", f": {name[:80]} is deeper than {MAX_DEPTH} tables and lists")
        parameters = function.get("parameters")
        if not isinstance(parameters, Mapping | None):
            raise InvalidPrompt(
                "tools", f": the parameters of {name[:80]} are {shown(parameters)}: they must be a JSON schema"
            )
        schema = {"type": "object", **parameters} if parameters else {"type": "object", "additionalProperties": False}
        field = f"tools[{index}].{'parameters' if function is table else 'function.parameters'}"
        tools[name] = Tool(name, schema, function.get("strict") is True, field)
    return list(tools.values())


def choose(tools: Sequence[Tool], choice: str | Mapping[str, Any] | None, *, parallel: bool = True) -> Choice:
    """The choice of a `tool_choice`: "none", "auto", "required", a function by its name, or allowed functions as in OpenAI's
    API. None: "auto", if there are tools. A named function is called once, as is any function without
    `parallel`.

    Raises:
        InvalidSamplingParams: another value, or a tool that is not there.
    """
    if isinstance(choice, Mapping) and not choice:
        choice = None
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _allowed(tools, choice.get("allowed_tools"), parallel=parallel)
    word = choice if isinstance(choice, str) else "auto" if choice is None else ""
    if word == "none" or (not tools and word == "auto"):
        return Choice(tuple(tools), is_off=True)
    max_calls = None if parallel else 1
    if word == "auto":
        return Choice(tuple(tools), max_calls=max_calls)
    if word == "required":
        if not tools:
            raise InvalidSamplingParams("tool_choice", " is 'required', but there are no tools: give some")
        return Choice(tuple(tools), is_forced=True, max_calls=max_calls)
    return Choice((_named(tools, choice),), is_forced=True, max_calls=1)


def _allowed(tools: Sequence[Tool], allowed: object, *, parallel: bool) -> Choice:
    """The choice of {"mode": "auto" or "required", "tools": [{"type": "function", "function": {"name": ...}}, ...]}."""
    mode, entries = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(entries, list | tuple) or not entries:
        raise InvalidSamplingParams(
            "tool_choice",
            f" has the allowed_tools {shown(allowed)}: they must have a mode, 'auto' or 'required', and tools",
        )
    if len(entries) > MAX_TOOLS:
        raise InvalidSamplingParams("tool_choice", f" allows {len(entries)} tools: at most {MAX_TOOLS} can be")
    names = {_named(tools, entry).name for entry in entries}
    return choose([tool for tool in tools if tool.name in names], mode, parallel=parallel)


def _named(tools: Sequence[Tool], choice: object) -> Tool:
    """The tool of an entry {"type": "function", "function": {"name": ...}}."""
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise InvalidSamplingParams(
            "tool_choice",
            f" is {shown(choice)}: it must be 'none', 'auto', 'required', or a function of tools by its name",
        )
    tool = next((each for each in tools if each.name == name), None)
    if tool is None:
        raise InvalidSamplingParams("tool_choice", f" names {shown(name)}, which is none of the tools")
    return tool
