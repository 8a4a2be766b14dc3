"""Depth: how many tables and lists may be inside each other in what users give. Who walks them calls itself, and has an end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MAX_DEPTH = 64


def is_too_deep(value: object) -> bool:
    """Whether there are more than `MAX_DEPTH` of them."""
    level = _inside([value])
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        level = _inside(inner for own in level for inner in (own.values() if isinstance(own, Mapping) else own))
    return bool(level)


def _inside(values: Iterable[object]) -> list[Any]:
    """The tables and lists among values."""
    return [own for own in values if isinstance(own, Mapping | list | tuple)]
