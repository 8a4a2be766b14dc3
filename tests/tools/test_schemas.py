"""Which schemas of tools can be promised."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine.errors import InvalidSamplingParams
from nanoengine.tools.schemas import check_schema
from nanoengine.tools.tool import read_tools


def check(parameters: dict[str, Any] | None) -> None:
    [tool] = read_tools([{"name": "f", "parameters": parameters}])
    check_schema(tool)


@pytest.mark.parametrize("schema", [None, {}, {"properties": {"a": {"type": "integer"}}}, {"type": "object"}], ids=str)
def test_schemas_that_a_grammar_can_hold(schema: dict[str, Any] | None) -> None:
    check(schema)


DEEP: dict[str, Any] = {}
for _ in range(100):
    DEEP = {"properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"a": {"not": {}}}}, '"not"'),
        ({"properties": {"a": {"type": "objekt"}}}, "objekt"),
        ({"properties": {"a": {"$ref": "https://example.com/other.json"}}}, "not present"),
        ({"x-guidance": {"lenient": True}, "properties": {"a": {"not": {}}}}, '"not"'),
        ({"properties": {"a": {"const": {1, 2}}}}, "set"),
        (DEEP, "deeper"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_others_are_refused_by_tool_and_keyword(schema: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidSamplingParams, match=r"^tools: the parameters of f cannot be promised") as refused:
        check(schema)
    assert named in str(refused.value)
