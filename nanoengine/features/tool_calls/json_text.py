"""JSON text with numbers of any size: grammars allow numbers beyond the range of floats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

HUGE = "1e999"
"""The spelling of a number beyond every float; a reader treats it as it treats the number itself."""

MAX_DIGITS = 4000
"""Limit of the digits of an integer; Python's limit is a little higher."""

PARTS = re.compile(r'"|\\|[\d.eE+\-]+|[^"\\\d.eE+\-]+')
CONTROL = re.compile(r"[\x00-\x1f]")

OF_PYTHON = re.compile(r'("(?:[^"\\]|\\.)*")|Infinity')


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _integer(text: str) -> int | float:
    return int(text) if len(text) <= MAX_DIGITS else float(text)


_options: dict[str, Any] = {"parse_int": _integer, "parse_constant": _refuse}
_strict, _lax = json.JSONDecoder(**_options), json.JSONDecoder(strict=False, **_options)


def loads(text: str, *, strict: bool = False) -> Any:
    """The value of JSON.

    Args:
        strict: line breaks in strings must be escaped; small models do not escape them.

    Raises:
        ValueError, RecursionError: it is no JSON, or too deep.
    """
    return (_strict if strict else _lax).decode(text)


def dumps(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """The JSON of a value. `default`: see `json.dumps`. Raises TypeError, ValueError, RecursionError: it has none."""
    text = json.dumps(value, ensure_ascii=False, default=default)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        text = json.dumps(value, default=default)
    return OF_PYTHON.sub(lambda match: match[1] or HUGE, text) if "Infinity" in text else text


class JsonPieces:
    """Streamed JSON text: control characters in strings are escaped, and a number is returned in one piece,
    as `HUGE` if it is beyond every float.
    """

    def __init__(self) -> None:
        self._is_in_string = self._is_escaped = False
        self._number: list[str] = []

    def push(self, text: str) -> str:
        """The next part of the text that is certain."""
        certain = []
        for part in PARTS.findall(text):
            if self._is_in_string:
                certain.append(CONTROL.sub(lambda match: json.dumps(match[0])[1:-1], part))
                self._is_in_string = self._is_escaped or part != '"'
                self._is_escaped = part == "\\" and not self._is_escaped
            elif part[0] in "0123456789.eE+-":  # or the end of a word
                self._number.append(part)
            else:
                certain += [_number("".join(self._number)), part]
                self._number.clear()
                self._is_in_string = part == '"'
        return "".join(certain)


def _number(text: str) -> str:
    """The spelling of a number."""
    if len(text) < 5 or (len(text) <= MAX_DIGITS and text.lstrip("-").isdigit()):
        return text
    try:
        is_huge = abs(float(text)) == float("inf")
    except ValueError:
        return text
    return ("-" if text[0] == "-" else "") + HUGE if is_huge else text
