"""Items: what a conversation of /v1/responses is made of, and its tools, as /v1/chat/completions has them."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from nanoengine.server.errors import Problem
from nanoengine.server.protocol import Table
from nanoengine.server.replies import call, function, said

TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Kinds of parts that are text, and where it stands."""

ROLES = ("user", "assistant", "system", "developer")

LEFT_OUT = ("web_search", "web_search_preview")
"""Tools that OpenAI's server runs by itself. The model is not told of them, so it asks for none; Codex always sends one."""


class Tools:
    """The tools of a request. Those of a namespace are the model's under both names."""

    def __init__(self, tables: list[Table]):
        self.tables: list[Table] = []
        self._names: dict[str, Table] = {}
        for table in tables:
            self._add(table)

    def _add(self, table: Table, namespace: str | None = None) -> None:
        kind, name = table.get("type"), table.get("name") or ""
        if not isinstance(name, str):
            raise Problem(400, f"tools: the name of a tool must be a text, not {str(name)[:80]!r}", "tools")
        if kind == "namespace" and namespace is None:
            given = table.get("tools") or []
            if not isinstance(given, list) or not all(isinstance(own, dict) for own in given):
                raise Problem(400, "tools: the tools of a namespace must be a list of objects", "tools")
            for own in given:
                self._add(own, name)
        elif kind == "function":
            flat = flat_name(name, namespace)
            self._names[flat] = {"name": name, **({"namespace": namespace} if namespace else {})}
            strict = table.get("strict")
            self.tables.append(function(flat, table.get("description"), table.get("parameters"), strict))
        elif not str(kind).startswith(LEFT_OUT):
            raise Problem(400, f"tools of type {str(kind)[:80]!r} are not supported: give functions", "tools")

    def names(self, flat: str) -> Table:
        """How the client calls a tool that the model has called."""
        return self._names.get(flat, {"name": flat})


def flat_name(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name


def input_items(value: str | list[Table]) -> list[Table]:
    """The input of a request as items; text is a message of the user's."""
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


def turns(items: list[Table]) -> list[Table]:
    """Messages of a chat. What the model has said and called without a word from outside is one message."""
    found: list[Table] = []
    thought = ""
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.get("type") or "message"
        if kind == "message":
            role, content = item.get("role"), _content(item.get("content"), where)
            if role not in ROLES:
                raise Problem(
                    400, f"{where}: role is {str(role)[:80]!r}: it must be one of {', '.join(ROLES)}", "input"
                )
            if role == "assistant":
                found.append(said(content, [], thought))
                thought = ""
            else:
                found.append({"role": role, "content": content})
        elif kind == "function_call":
            name = flat_name(_text(item, "name", where), item.get("namespace"))
            own = call(_text(item, "call_id", where), name, _text(item, "arguments", where))
            last = found[-1] if found else {}
            if last.get("role") == "assistant" and not thought:
                last.setdefault("tool_calls", []).append(own)
            else:
                found.append(said(None, [own], thought))
                thought = ""
        elif kind == "function_call_output":
            content = _content(item.get("output"), where)
            found.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content})
        elif kind == "reasoning":
            thought += _thought(item, where)
        else:
            raise Problem(400, f"{where}: items of type {str(kind)[:80]!r} are not supported", "input")
    return found


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [] if content is None else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if str(kind) not in TEXTS:
            message = f"{where}: content of type {str(kind)[:80]!r} is not supported: this model takes text"
            raise Problem(400, message, "input")
        texts.append(_text(part, TEXTS[str(kind)], where))
    return "\n".join(texts)


def _text(table: Table, name: str, where: str) -> str:
    value = table.get(name)
    if not isinstance(value, str):
        raise Problem(400, f"{where}.{name} must be a text", "input")
    return value


# ---- thoughts


def carried(thought: str) -> str:
    """A thought as clients carry it to their next request: they send back what they cannot read, and no plain thoughts."""
    return base64.b64encode(thought.encode()).decode()


def _thought(item: Table, where: str) -> str:
    parts = item.get("content")
    if parts and isinstance(parts, list):
        return "".join(_text(part, "text", where) for part in parts if isinstance(part, dict))
    try:
        return base64.b64decode(item.get("encrypted_content") or "", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, TypeError, ValueError):  # another server's, which alone can read it
        return ""
