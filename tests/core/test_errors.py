"""Errors about a value are ValueErrors too, and messages quote any value in short."""

from __future__ import annotations

import pytest

from nanoengine.core import errors
from nanoengine.core.errors import InvalidConfig, NanoEngineError, shown

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, NanoEngineError)]


def test_all_say_what_they_mean_and_who_knows_no_names_can_catch_them() -> None:
    for kind in ALL:
        assert kind.__doc__
        if kind.__name__.startswith("Invalid"):
            assert issubclass(kind, ValueError)
    assert issubclass(errors.UnknownOption, TypeError)


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, list(range(10**6)), {str(i): i for i in range(1000)}, [[[[[[1]]]]]], 10**5000, [10**5000]],
    ids=["text", "list", "table", "depth", "number", "number in a list"],
)
def test_a_value_of_any_size_is_shown_in_short(value: object) -> None:
    assert len(shown(value)) < 300


def test_a_message_of_any_size_is_cut_and_keeps_its_end() -> None:
    assert str(InvalidConfig("short")) == "short"
    text = str(InvalidConfig("start " + "x" * 10**6 + " end"))
    assert len(text) < 2100
    assert text.startswith("start ")
    assert text.endswith(" end")


def test_a_small_value_is_its_repr() -> None:
    for value in (None, True, "a'b", 3.5, [1, "a"], {"a": (1,)}):
        assert shown(value) == repr(value)
