"""History: the messages of OpenAI's clients, in the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nanoengine.features.tool_calls.json_text import dumps, loads

Message = Mapping[str, Any]

TOLD = """You can call these functions, each of which is given by its JSON schema:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments in this form:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>
What it returns is told to you between <tool_response> and </tool_response>."""


TOLD_FIRST = TOLD.partition("\n")[0]


def for_template(messages: Sequence[Message]) -> list[Message]:
    """Messages for templates: arguments are tables, a message with calls has a content, and the role developer is system."""
    return [_message(own) if _has_role(own) else own for own in messages]  # what is no message, others refuse


def tools_for_template(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    """Tools as templates expect them: None if there are none, and no field that is null, outside of schemas."""
    return [_without_nulls(tool) for tool in tools or ()] or None


def _without_nulls(table: Mapping[str, Any]) -> Mapping[str, Any]:
    kept = {name: value for name, value in table.items() if value is not None}
    return kept | {"function": _without_nulls(own)} if isinstance(own := kept.get("function"), Mapping) else kept


def in_words(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[Message]:
    """Messages from `for_template`, with tools, calls and results in their text: for templates that know of none of these."""
    found = [_in_words(own) if _has_role(own) else own for own in messages]
    if tools:
        told = TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False, default=str) for tool in tools))
        first = found[0] if found else {}
        if _has_role(first) and first["role"] == "system" and isinstance(first.get("content"), str):
            found[0] = {**first, "content": f"{first['content']}\n\n{told}"}
        else:
            found.insert(0, {"role": "system", "content": told})
    return found


def _has_role(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)


def _message(message: Message) -> Message:
    own = dict(message)
    if own.get("role") == "developer":
        own["role"] = "system"
    calls = own.get("tool_calls")
    if isinstance(calls, list) and calls:
        own["tool_calls"] = [_with_table(_without_nulls(call) if isinstance(call, Mapping) else call) for call in calls]
        own["content"] = own.get("content") or ""
    return own


def _with_table(call: Any) -> Any:
    """A call whose arguments are a table, if they are the text of one, or missing."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments") or "", str):
        return call
    try:
        arguments = loads(text or "{}", strict=True)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, Mapping) else call


def _in_words(message: Message) -> Message:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content')}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    functions = [call.get("function", call) if isinstance(call, Mapping) else call for call in calls]
    texts = [f"<tool_call>\n{dumps(own, str)}\n</tool_call>" for own in functions]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return kept | {"content": "\n".join([own for own in [str(message.get("content") or "")] if own] + texts)}
