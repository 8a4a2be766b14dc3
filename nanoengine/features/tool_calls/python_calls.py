"""PythonCalls: reads calls as Python writes them, such as [name(key="value", other=[1, None])]; or a list of them in JSON."""

from __future__ import annotations

import json
import re

from nanoengine.features.tool_calls.json_calls import JsonCalls, JsonEnd, NameAndArguments

OUTSIDE = re.compile(r"""["'{}\[\]]""")
"""Outside of strings: characters that open or close something."""

TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<number>\d[\w.+\-]*)|(?P<end>\))"""
    r"|(?P<name>[A-Za-z_][\w.\-]{0,127})\(|(?P<key>[A-Za-z_]\w{0,127})\s{0,8}=|(?P<word>\w+)",
    re.DOTALL,
)
HEX = "[0-9a-fA-F]"
ESCAPE = re.compile(rf'\\[xuU]((?<=x){HEX}{{2}}|(?<=u){HEX}{{4}}|(?<=U){HEX}{{8}})|\\(["\\bfnrt])|\\(.)|"', re.DOTALL)
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


class PythonCalls(JsonCalls):
    """A list of calls. Arguments have keywords and are literals: what has others is no call."""

    def new_end(self) -> JsonEnd:
        return JsonEnd(OUTSIDE, "\"'")

    def calls(self, text: str) -> list[NameAndArguments] | None:
        return super().calls(text if re.match(r"\s*\[?\s*\{", text) else as_json(text))


def as_json(text: str) -> str:
    """A list of calls in JSON, each with its name and its arguments; what is no such list becomes no JSON.

    Raises:
        ValueError: it is no such list.
    """
    is_inside = False  # of a call

    def told(token: re.Match[str]) -> str:
        nonlocal is_inside
        kind, own = str(token.lastgroup), token[str(token.lastgroup)]
        if kind in ("name", "end"):
            if is_inside is (kind == "name"):
                raise ValueError("a call in a call, or an end without a call")
            is_inside = not is_inside
            return f'{{"name": {json.dumps(own)}, "arguments": {{' if is_inside else "}}"
        if kind == "key":
            return f"{json.dumps(own)}: "
        return _literal(token)

    return TOKEN.sub(told, text)


def literal_as_json(text: str) -> str:
    """A literal in JSON; what is none becomes no JSON.

    Raises:
        ValueError: it holds a call.
    """
    return TOKEN.sub(_literal, text)


def _literal(token: re.Match[str]) -> str:
    kind, own = str(token.lastgroup), token[str(token.lastgroup)]
    if kind == "string":
        return f'"{ESCAPE.sub(_escaped, own[1:-1])}"'
    if kind in ("number", "word"):
        return own if kind == "number" else WORDS.get(own, own)
    raise ValueError("a call in a literal")


def _escaped(own: re.Match[str]) -> str:
    """An escape of a string, or a quote in it, as JSON has it."""
    number, known, other = own.groups()
    if number is not None:
        return json.dumps(chr(int(number, 16)))[1:-1]
    if known is not None:
        return own[0]
    if other is None:
        return r"\""
    return "" if other == "\n" else other if other == "'" else rf"\\{other}"
