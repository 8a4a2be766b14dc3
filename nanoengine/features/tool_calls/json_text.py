"""JSON of any numbers: those that are larger than a float can be, which a grammar allows, are read and written, too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

HUGE = "1e999"
"""What a number is written as that is larger than any float: whoever reads it makes of it what it makes of the number itself."""

MAX_DIGITS = 4000
"""The most digits that are read as an integer; Python refuses a few more."""

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
    return OF_PYTHON.sub(lambda own: own[1] or HUGE, text) if "Infinity" in text else text


class JsonPieces:
    """Tells JSON that comes in pieces as it is written, except that control characters in strings are escaped, and that a number
    comes whole: as `HUGE` if it is larger than a float can be.
    """

    def __init__(self) -> None:
        self._is_in_string = self._is_escaped = False
        self._number: list[str] = []

    def push(self, text: str) -> str:
        """What more of the text is certain now."""
        told = []
        for part in PARTS.findall(text):
            if self._is_in_string:
                told.append(CONTROL.sub(lambda own: json.dumps(own[0])[1:-1], part))
                self._is_in_string = self._is_escaped or part != '"'
                self._is_escaped = part == "\\" and not self._is_escaped
            elif part[0] in "0123456789.eE+-":  # or the end of a word
                self._number.append(part)
            else:
                told += [_number("".join(self._number)), part]
                self._number.clear()
                self._is_in_string = part == '"'
        return "".join(told)


def _number(text: str) -> str:
    """A number as it is told."""
    if len(text) < 5 or (len(text) <= MAX_DIGITS and text.lstrip("-").isdigit()):
        return text
    try:
        is_huge = abs(float(text)) == float("inf")
    except ValueError:
        return text
    return ("-" if text[0] == "-" else "") + HUGE if is_huge else text
