"""Tool and Choice: a function that a model may call, and the `tool_choice` of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoengine.core.errors import InvalidPrompt, InvalidSamplingParams, shown
from nanoengine.depth import MAX_DEPTH, is_too_deep

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
        is_off: the answer calls none; text that looks like a call is text.
        most: the most calls of one answer; None: any number.
    """

    tools: tuple[Tool, ...]
    is_forced: bool = False
    is_off: bool = False
    most: int | None = None


def read_tools(tables: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    """Tools as clients write them: {"type": "function", "function": {"name": ..., "parameters": {...}, "strict": ...}}.

    Raises:
        InvalidPrompt: a value that is no tool, has no name or the name of another, or is too deep.
    """
    if tables is not None and not isinstance(tables, list | tuple):
        raise InvalidPrompt(f"tools must be a list of JSON schemas of functions, not {shown(tables)}")
    if tables is not None and len(tables) > MAX_TOOLS:
        raise InvalidPrompt(f"tools holds {len(tables)} functions: at most {MAX_TOOLS} can be")
    tools: dict[str, Tool] = {}
    for index, table in enumerate(tables or ()):
        own = table.get("function", table) if isinstance(table, Mapping) else None
        name = own.get("name") if isinstance(own, Mapping) else None
        if own is None or not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS or name in tools:
            raise InvalidPrompt(
                f"tools holds {shown(table)}: a tool is a table, the JSON schema of a function, with a name of its own"
            )
        if is_too_deep(table):
            raise InvalidPrompt(f"tools: {name[:80]} is deeper than {MAX_DEPTH} tables and lists")
        parameters = own.get("parameters")
        if not isinstance(parameters, Mapping | None):
            raise InvalidPrompt(
                f"tools: the parameters of {name[:80]} are {shown(parameters)}: they must be a JSON schema"
            )
        schema = {"type": "object", **parameters} if parameters else {"type": "object", "additionalProperties": False}
        field = f"tools[{index}].{'parameters' if own is table else 'function.parameters'}"
        tools[name] = Tool(name, schema, own.get("strict") is True, field)
    return list(tools.values())


def choose(tools: Sequence[Tool], choice: str | Mapping[str, Any] | None, *, parallel: bool = True) -> Choice:
    """What a `tool_choice` says: "none", "auto", "required", a function by its name, or which functions are allowed, as OpenAI
    has it. None: "auto", if there are tools. A named function is called once, and so is any unless there may be calls in
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
    most = None if parallel else 1
    if word == "auto":
        return Choice(tuple(tools), most=most)
    if word == "required":
        if not tools:
            raise InvalidSamplingParams("tool_choice is 'required', but there are no tools: give some")
        return Choice(tuple(tools), is_forced=True, most=most)
    return Choice((_named(tools, choice),), is_forced=True, most=1)


def _allowed(tools: Sequence[Tool], allowed: object, *, parallel: bool) -> Choice:
    """Of {"mode": "auto" or "required", "tools": [{"type": "function", "function": {"name": ...}}, ...]}."""
    mode, own = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(own, list | tuple) or not own:
        raise InvalidSamplingParams(
            f"tool_choice has the allowed_tools {shown(allowed)}: they must have a mode, 'auto' or 'required', and tools"
        )
    if len(own) > MAX_TOOLS:
        raise InvalidSamplingParams(f"tool_choice allows {len(own)} tools: at most {MAX_TOOLS} can be")
    names = {_named(tools, one).name for one in own}
    return choose([tool for tool in tools if tool.name in names], mode, parallel=parallel)


def _named(tools: Sequence[Tool], choice: object) -> Tool:
    """The function that a {"type": "function", "function": {"name": ...}} names."""
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise InvalidSamplingParams(
            f"tool_choice is {shown(choice)}: it must be 'none', 'auto', 'required', or a function of tools by its name"
        )
    found = next((tool for tool in tools if tool.name == name), None)
    if found is None:
        raise InvalidSamplingParams(f"tool_choice names {shown(name)}, which is none of the tools")
    return found
