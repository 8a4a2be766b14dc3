"""Values of every type and depth, for every field of a table that comes from outside."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from nanoengine.errors import NanoEngineError

DEEP_LIST, DEEP_TABLE = json.loads("[" * 300 + "]" * 300), json.loads('{"a":' * 300 + "1" + "}" * 300)

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, -(2**70), 10**400, 0.5, 1e308, 5e-324, float("inf"), float("nan")),
    *("", "x", "4", "\ud800", "\0", "[" * 20_000, "a" * 10**5, "nan", "-", "é.ü", "a\n"),
    *([], [None], [1], [-1, 10**400], ["x"], [[]], [{}], [1.5, float("nan")], [[1, 2], [3]], DEEP_LIST),
    *({}, {"": []}, {"a": 1}, {"a": {"b": None}}, {"0": {}}, {"content": 7}, {"type": []}, DEEP_TABLE),
]
"""What JSON can hold."""


def fields_in(table: Any, depth: int = 100, most_items: int = 100) -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
    """Every field in a table or list, at any depth: its name, its value, and a function that returns a copy of all with another
    value there. Of a list, the first items are looked at."""
    if not depth or not isinstance(table, Mapping | list):
        return
    for key, inner in table.items() if isinstance(table, Mapping) else enumerate(table[:most_items]):

        def replaced(value: Any, key: Any = key) -> Any:
            copy: Any = dict(table) if isinstance(table, Mapping) else list(table)
            copy[key] = value
            return copy

        yield str(key), inner, replaced
        for name, value, below in fields_in(inner, depth - 1, most_items):
            yield name, value, lambda other, replaced=replaced, below=below: replaced(below(other))


def changed(table: Any, values: Sequence[Any] = VALUES, depth: int = 4) -> Iterator[tuple[str, Any]]:
    """The table once for each field in it and each value: with the value in place of the field's. Each comes with the name of
    the field."""
    for name, _, replaced in fields_in(table, depth, most_items=2):
        yield from ((name, replaced(value)) for value in values)


def complaint(call: Callable[[], object], field: str = "") -> str | None:
    """What is wrong with the end of a call: None if it returns, or raises an error of ours that is short and names the field."""
    try:
        call()
    except NanoEngineError as error:
        return None if 0 < len(str(error)) < 2100 and field in str(error) else str(error)[:300]
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"
    return None


def wrong(read: Callable[[Any], Any], table: Any, most: int = 10**6, values: Sequence[Any] = VALUES) -> list[str]:
    """The fields of a table with whose values `read` ends otherwise than well, or with an error of ours that is short; of all
    tables, at most so many are drawn."""
    tables = list(changed(table, values))
    drawn = random.Random(0).sample(tables, min(most, len(tables)))
    complaints = {name: text for name, other in drawn if (text := complaint(partial(read, other)))}
    return [f"{name}: {text}" for name, text in complaints.items()]
