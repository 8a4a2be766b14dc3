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
