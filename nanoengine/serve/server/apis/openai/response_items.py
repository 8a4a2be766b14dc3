"""Items of /v1/responses, which are messages and calls, and tools, as /v1/chat/completions has them."""

from __future__ import annotations

import base64
import binascii
from functools import partial
from typing import Any

from nanoengine.serve.server.apis.conversation import assistant_message, text_of, tool_call, tool_table, unsupported
from nanoengine.serve.server.bodies.protocol import Table
from nanoengine.serve.server.errors import APIError

TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of parts that are text, and the field of the text."""

ROLES = ("user", "assistant", "system", "developer")

LEFT_OUT = ("web_search", "web_search_preview")
"""Tools that OpenAI's server runs by itself. They are left out of the prompt: Codex always sends one."""


_text = partial(text_of, param="input")


class Tools:
    """The tools of a request. The model knows a tool of a namespace by both names, joined."""

    def __init__(self, tables: list[Table]):
        self.tables: list[Table] = []
        self.fields: dict[str, str] = {}  # the path of each tool's parameters in our request, and in the client's
        self._names: dict[str, Table] = {}
        for index, table in enumerate(tables):
            self._add(table, f"tools[{index}]")

    def _add(self, table: Table, path: str, namespace: str | None = None) -> None:
        kind, name = table.get("type"), table.get("name") or ""
        if not isinstance(name, str):
            raise APIError(400, f"tools: the name of a tool must be a text, not {str(name)[:80]!r}", "tools")
        if kind == "namespace" and namespace is None:
            tools = table.get("tools") or []
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise APIError(400, "tools: the tools of a namespace must be a list of objects", "tools")
            for index, tool in enumerate(tools):
                self._add(tool, f"{path}.tools[{index}]", name)
        elif kind == "function":
            flat = flat_name(name, namespace)
            self._names[flat] = {"name": name, **({"namespace": namespace} if namespace else {})}
            strict = table.get("strict")
            self.fields[f"tools[{len(self.tables)}].function.parameters"] = f"{path}.parameters"
            self.tables.append(tool_table(flat, table.get("description"), table.get("parameters"), strict))
        elif not str(kind).startswith(LEFT_OUT):
            raise APIError(400, f"tools of type {str(kind)[:80]!r} are not supported: give functions", "tools")

    def names(self, flat: str) -> Table:
        """The client's names of a tool that the model has called."""
        return self._names.get(flat, {"name": flat})


def flat_name(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name


def turns(items: str | list[Table]) -> list[Table]:
    """The input of a request as messages of a chat: a text of the user's, or items. Texts and calls of the model, one behind the
    other, are one message.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Table] = []
    thought = ""
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.get("type") or "message"
        if kind == "message":
            role, content = item.get("role"), _content(item.get("content"), where)
            if role not in ROLES:
                raise APIError(
                    400, f"{where}: role is {str(role)[:80]!r}: it must be one of {', '.join(ROLES)}", "input"
                )
            if role == "assistant":
                messages.append(assistant_message(content, [], thought))
                thought = ""
            else:
                messages.append({"role": role, "content": content})
        elif kind == "function_call":
            name = flat_name(_text(item, "name", where), item.get("namespace"))
            call = tool_call(_text(item, "call_id", where), name, _text(item, "arguments", where))
            last = messages[-1] if messages else {}
            if last.get("role") == "assistant" and not thought:
                last.setdefault("tool_calls", []).append(call)
            else:
                messages.append(assistant_message(None, [call], thought))
                thought = ""
        elif kind == "function_call_output":
            content = _content(item.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content})
        elif kind == "reasoning":
            thought += _thought(item, where)
        else:
            raise unsupported("items", kind, where, "input")
    return messages


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [] if content is None else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if str(kind) not in TEXTS:
            raise unsupported("parts", kind, where, "input")
        texts.append(_text(part, TEXTS[str(kind)], where))
    return "\n".join(texts)


# ---- thoughts


def encode_thought(thought: str) -> str:
    """A thought as `encrypted_content`, which clients send back with their next request; they do not send back plain thoughts."""
    return base64.b64encode(thought.encode()).decode()


def _thought(item: Table, where: str) -> str:
    parts = item.get("content")
    if parts and isinstance(parts, list):
        return "".join(_text(part, "text", where) for part in parts if isinstance(part, dict))
    try:
        return base64.b64decode(item.get("encrypted_content") or "", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, TypeError, ValueError):  # another server's, which alone can read it
        return ""
