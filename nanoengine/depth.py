"""The limit of nested tables and lists in values from users: functions that traverse them are recursive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MAX_DEPTH = 64


def is_nested_too_deeply(value: object) -> bool:
    """Whether more than `MAX_DEPTH` tables and lists are nested in a value."""
    level = _containers([value])
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        level = _containers(inner for each in level for inner in (each.values() if isinstance(each, Mapping) else each))
    return bool(level)


def _containers(values: Iterable[object]) -> list[Any]:
    """The tables and lists among values."""
    return [value for value in values if isinstance(value, Mapping | list | tuple)]
