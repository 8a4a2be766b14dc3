"""What clients say of tools, and of which must be called."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine.depth import MAX_DEPTH
from nanoengine.errors import InvalidPrompt, InvalidSamplingParams
from nanoengine.features.tool_calls.tool import MAX_TOOLS, choose, read_tools
from tests.test_depth import nested

NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
SUM: dict[str, Any] = {"name": "sum", "parameters": {"properties": {"a": {}}}, "strict": True}


def test_tools_are_read() -> None:
    now, total = read_tools([NOW, SUM])
    assert (now.name, now.parameters, now.is_strict) == (
        "now",
        {"type": "object", "additionalProperties": False},
        False,
    )
    assert (total.name, total.is_strict) == ("sum", True)
    assert total.parameters == {"type": "object", "properties": {"a": {}}}
    assert read_tools(None) == read_tools([]) == []


@pytest.mark.parametrize(
    "tables",
    [
        *("tools", {"name": "now"}, [5], [{}], [{"function": 5}], [{"function": {"name": ""}}], [{"name": "x" * 129}]),
        *([NOW, NOW], [NOW["function"] | {"parameters": 5}], [{"name": f"f{i}"} for i in range(MAX_TOOLS + 1)]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_tool_is_refused(tables: Any) -> None:
    with pytest.raises(InvalidPrompt, match="tool"):
        read_tools(tables)


def test_a_tool_that_is_too_deep_is_refused() -> None:
    for depth in (MAX_DEPTH, 100_000):
        with pytest.raises(InvalidPrompt, match=f"^tools: f is deeper than {MAX_DEPTH}"):
            read_tools([{"name": "f", "parameters": nested(depth)}])


def test_a_choice_says_who_is_called() -> None:
    tools = read_tools([NOW, SUM])
    assert choose(tools, None) == choose(tools, "auto")
    assert not choose(tools, "auto").is_forced
    assert choose(tools, "none").is_off
    assert choose([], None).is_off
    assert choose([], "auto").is_off
    assert choose(tools, "required").is_forced
    named = choose(tools, {"type": "function", "function": {"name": "sum"}})
    assert ([own.name for own in named.tools], named.is_forced) == (["sum"], True)


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_some_of_the_tools_may_be_allowed() -> None:
    tools = read_tools([NOW, SUM])
    assert choose(tools, allowed("auto", "sum")) == choose(tools[1:], "auto")
    assert choose(tools, allowed("required", "sum", "now", "sum"), parallel=False) == choose(
        tools, "required", parallel=False
    )


@pytest.mark.parametrize(
    "choice",
    [
        *("sometimes", 5, {"type": "function"}, {"type": "function", "function": {"name": "other"}}),
        *({"type": "allowed_tools"}, allowed("none", "now"), allowed("auto"), allowed("auto", "now", "other")),
    ],
    ids=str,
)
def test_choices_that_are_none_are_refused(choice: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match=r"^tool_choice"):
        choose(read_tools([NOW]), choice)
    with pytest.raises(InvalidSamplingParams, match=r"^tool_choice"):
        choose([], "required")
