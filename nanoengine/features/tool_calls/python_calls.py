"""PythonCalls: calls in Python syntax, such as [name(key="value", other=[1, None])], or a list of calls in JSON."""

from __future__ import annotations

import json
import re

from nanoengine.features.tool_calls.json_calls import JsonCalls, JsonEnd, NameAndArguments

OUTSIDE = re.compile(r"""["'{}\[\]]""")
"""Brackets and quotes outside of strings."""

TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<number>\d[\w.+\-]*)|(?P<end>\))"""
    r"|(?P<name>[A-Za-z_][\w.\-]{0,127})\(|(?P<key>[A-Za-z_]\w{0,127})\s{0,8}=|(?P<word>\w+)",
    re.DOTALL,
)
HEX = "[0-9a-fA-F]"
ESCAPE = re.compile(rf'\\[xuU]((?<=x){HEX}{{2}}|(?<=u){HEX}{{4}}|(?<=U){HEX}{{8}})|\\(["\\bfnrt])|\\(.)|"', re.DOTALL)
WORDS = {"True": "true", "False": "false", "None": "null"}
"""JSON of values in Python's spelling, which templates and models use."""


class PythonCalls(JsonCalls):
    """A list of calls whose arguments are keywords with literal values; anything else is not a call."""

    def new_end(self) -> JsonEnd:
        return JsonEnd(OUTSIDE, "\"'")

    def calls(self, text: str) -> list[NameAndArguments] | None:
        return super().calls(text if re.match(r"\s*\[?\s*\{", text) else as_json(text))


def as_json(calls: str) -> str:
    """The JSON of a list of calls, each with name and arguments; the result for other text is not JSON.

    Raises:
        ValueError: it is not such a list.
    """
    is_inside = False  # of a call

    def as_text(token: re.Match[str]) -> str:
        nonlocal is_inside
        kind, text = str(token.lastgroup), token[str(token.lastgroup)]
        if kind in ("name", "end"):
            if is_inside is (kind == "name"):
                raise ValueError("a call in a call, or an end without a call")
            is_inside = not is_inside
            return f'{{"name": {json.dumps(text)}, "arguments": {{' if is_inside else "}}"
        if kind == "key":
            return f"{json.dumps(text)}: "
        return _literal(token)

    return TOKEN.sub(as_text, calls)


def literal_as_json(text: str) -> str:
    """The JSON of a literal; the result for other text is not JSON.

    Raises:
        ValueError: it holds a call.
    """
    return TOKEN.sub(_literal, text)


def _literal(token: re.Match[str]) -> str:
    kind, text = str(token.lastgroup), token[str(token.lastgroup)]
    if kind == "string":
        return f'"{ESCAPE.sub(_escaped, text[1:-1])}"'
    if kind in ("number", "word"):
        return text if kind == "number" else WORDS.get(text, text)
    raise ValueError("a call in a literal")


def _escaped(match: re.Match[str]) -> str:
    """The JSON spelling of an escape or a quote in a string."""
    number, known, other = match.groups()
    if number is not None:
        return json.dumps(chr(int(number, 16)))[1:-1]
    if known is not None:
        return match[0]
    if other is None:
        return r"\""
    return "" if other == "\n" else other if other == "'" else rf"\\{other}"
