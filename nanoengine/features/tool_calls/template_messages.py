"""Messages of OpenAI's clients in the form of chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nanoengine.features.tool_calls.json_text import dumps, loads

Message = Mapping[str, Any]

INSTRUCTIONS = """You can call these functions, each of which is given by its JSON schema:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments in this form:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>
What it returns is told to you between <tool_response> and </tool_response>."""


INSTRUCTIONS_START = INSTRUCTIONS.partition("\n")[0]


def for_template(messages: Sequence[Message]) -> list[Message]:
    """Messages for templates: arguments are objects, a message with calls has a content, and the role developer is system."""
    return [_message(item) if _has_role(item) else item for item in messages]  # the renderer refuses the others


def tools_for_template(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    """Tools for templates: None if there are none; fields that are null are removed, except in schemas."""
    return [_without_nulls(tool) for tool in tools or ()] or None


def _without_nulls(table: Mapping[str, Any]) -> Mapping[str, Any]:
    stated = {name: value for name, value in table.items() if value is not None}
    if isinstance(function := stated.get("function"), Mapping):
        stated["function"] = _without_nulls(function)
    return stated


def as_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[Message]:
    """Messages from `for_template` with tools, calls and results as text: for templates without tools."""
    result = [_as_text(item) if _has_role(item) else item for item in messages]
    if tools:
        lines = [json.dumps(tool, ensure_ascii=False, default=str) for tool in tools]
        instructions = INSTRUCTIONS.format(tools="\n".join(lines))
        first = result[0] if result else {}
        if _has_role(first) and first["role"] == "system" and isinstance(first.get("content"), str):
            result[0] = {**first, "content": f"{first['content']}\n\n{instructions}"}
        else:
            result.insert(0, {"role": "system", "content": instructions})
    return result


def _has_role(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)


def _message(message: Message) -> Message:
    result = dict(message)
    if result.get("role") == "developer":
        result["role"] = "system"
    calls = result.get("tool_calls")
    if isinstance(calls, list) and calls:
        result["tool_calls"] = [_with_table(call) for call in calls]
        result["content"] = result.get("content") or ""
    return result


def _with_table(call: Any) -> Any:
    """A call without nulls whose arguments are an object, if they are its JSON text, or missing."""
    if not isinstance(call, Mapping):
        return call
    call = _without_nulls(call)
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments") or "", str):
        return call
    try:
        arguments = loads(text or "{}", strict=True)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, Mapping) else call


def _as_text(message: Message) -> Message:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content')}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    functions = [call.get("function", call) if isinstance(call, Mapping) else call for call in calls]
    texts = [f"<tool_call>\n{dumps(function, str)}\n</tool_call>" for function in functions]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return others | {"content": "\n".join([text for text in [str(message.get("content") or "")] if text] + texts)}
