"""Tables and lists inside each other, up to a limit."""

from __future__ import annotations

from typing import Any

from nanoengine.depth import MAX_DEPTH, is_nested_too_deeply


def nested(depth: int) -> Any:
    """So many tables and lists, by turns; the innermost is empty."""
    value: Any = {}
    for number in range(1, depth):
        value = [value] if number % 2 else {"a": 1, "b": value}
    return value


def test_a_value_may_be_as_deep_as_the_limit() -> None:
    for value in ("text", 5, {}, [], {"a": []}, ["text", *nested(MAX_DEPTH)], [nested(MAX_DEPTH - 1)] * 100):
        assert not is_nested_too_deeply(value)


def test_and_no_deeper() -> None:
    for depth in (MAX_DEPTH + 1, MAX_DEPTH + 2, 100_000):
        assert is_nested_too_deeply(nested(depth))
    endless: list[Any] = []
    endless.append(endless)
    assert is_nested_too_deeply(endless)
