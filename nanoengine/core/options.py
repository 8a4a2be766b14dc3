"""Fields of options with their bounds, and one function that checks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, field, fields
from functools import cache
from numbers import Integral, Real
from typing import Any

from nanoengine.core.errors import InvalidConfig, NanoEngineError, shown

MAX_INT32 = 2**31 - 1
KINDS: dict[str, tuple[type, type, str]] = {
    "bool": (bool, bool, "True or False"),
    "int": (int, Integral, "an integer"),
    "float": (float, Real, "a number"),
    "str": (str, str, "text"),
}
"""Types of fields that `check` knows: the Python type, the class of accepted values, and its name in messages."""


def option(
    default: Any,
    low: float = 1,
    high: float = MAX_INT32,
    *,
    above: bool = False,
    choices: Sequence[str] = (),
    unit: str = "",
) -> Any:
    """A field of a dataclass of options, with its default and the rules that `check` applies.

    Args:
        low: the smallest number; with `above`, a number must be larger.
        high: the largest number.
        choices: a text is one of these. Empty: any text.
        unit: "bytes": `builder.read_config` takes text such as "2GiB", too.
    """
    return field(default=default, metadata={"range": (low, high, above), "choices": choices, "unit": unit})


@cache
def _checked_fields(kind: type) -> list[tuple[Field[Any], str, bool]]:
    """(field, type, whether None is allowed) of the fields of a dataclass with types of KINDS."""
    # Annotations are text in most modules, and types in others.
    types = [(each, str(getattr(each.type, "__name__", each.type))) for each in fields(kind) if each.init]
    known = [(each, name.removesuffix(" | None"), name.endswith(" | None")) for each, name in types]
    return [(each, name, may_be_none) for each, name, may_be_none in known if name in KINDS]


def check(options: Any, error: type[NanoEngineError] = InvalidConfig) -> None:
    """Check the fields of a dataclass by their types and by the rules of `option`; fields of other types are
    left to their class. Numbers of numpy become plain Python numbers.

    Raises:
        error: a value of another type, or outside its range.
    """
    for each, kind, may_be_none in _checked_fields(options.__class__):
        value, (plain, type_, must) = getattr(options, each.name), KINDS[kind]
        if value is None and may_be_none:
            continue
        is_right = type(value) is plain or (isinstance(value, type_) and not isinstance(value, bool))
        if kind in ("int", "float"):
            low, high, above = each.metadata["range"]
            is_right = is_right and low <= value <= high and not (above and value == low)
            must += f" above {low} and at most {high}" if above else f" from {low} to {high}"
        elif choices := each.metadata.get("choices"):
            is_right, must = is_right and value in choices, f"one of {', '.join(choices)}"
        if not is_right:
            raise error(each.name, f" is {shown(value)}: it must be {must}{', or None' * may_be_none}")
        if type(value) is not plain:
            object.__setattr__(options, each.name, plain(value))
