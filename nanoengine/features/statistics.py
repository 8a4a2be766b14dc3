"""Statistics: counters of engines, which are added field by field, and their names in `GET /metrics`."""

from __future__ import annotations

from dataclasses import MISSING, field, fields
from itertools import zip_longest
from typing import Any, Self


def metric(name: str, text: str, **options: Any) -> Any:
    """A field of statistics that `GET /metrics` shows: a counter, 0 at first, unless the options say otherwise.

    Args:
        name: of the metric, as vLLM has it, or with "nanoengine:" in front.
        text: the help text of the metric.
        options: `is_gauge`: a value of this moment. `bounds`: of its `Histogram`; None: for lengths up to `max_model_len`.
            `labels`: of its series, where several fields are one metric.
    """
    default: Any = MISSING if "bounds" in options else 0
    return field(default=default, metadata={"name": name, "text": text, **options})


class Statistics:
    """Base class of dataclasses of statistics. Numbers are added, lists index by index, tables key by key; None and a number make
    None.
    """

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        """The counts of two engines."""
        names = [each.name for each in fields(self)]  # type: ignore[arg-type]
        return type(self)(**{name: _sum(getattr(self, name), getattr(other, name)) for name in names})


def _sum(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return None
    if isinstance(one, list):
        return [first + second for first, second in zip_longest(one, other, fillvalue=0)]
    if isinstance(one, dict):
        return {key: one.get(key, 0) + other.get(key, 0) for key in one | other}
    return one + other
