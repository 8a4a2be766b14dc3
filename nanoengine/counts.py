"""Counts: statistics of engines, which are added field by field."""

from __future__ import annotations

from dataclasses import fields
from itertools import zip_longest
from typing import Any, Self


class Counts:
    """A base of dataclasses. Numbers are added, lists place by place, and tables key by key; None and a number make None."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        """The counts of two engines."""
        names = [own.name for own in fields(self)]  # type: ignore[arg-type]
        return type(self)(*(_sum(getattr(self, name), getattr(other, name)) for name in names))


def _sum(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return None
    if isinstance(one, list):
        return [first + second for first, second in zip_longest(one, other, fillvalue=0)]
    if isinstance(one, dict):
        return {key: one.get(key, 0) + other.get(key, 0) for key in one | other}
    return one + other
