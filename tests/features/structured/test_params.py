"""What structured outputs can be asked for, and what is refused by name."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest

from nanoengine import SamplingParams
from nanoengine.depth import MAX_DEPTH
from nanoengine.errors import InvalidSamplingParams
from nanoengine.features.structured.params import StructuredOutputs
from nanoengine.features.tool_calls.schemas import MAX_CHARS


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth > 1 else {}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"json": {"type": "integer"}}, "json", '{"type": "integer"}'),
        ({"json": ' {"const": "é"} '}, "json", '{"const": "é"}'),
        ({"json": True}, "json", "{}"),
        ({"json": nested(MAX_DEPTH)}, "json", None),
        ({"json_object": True}, "json_object", '{"type": "object"}'),
        ({"regex": "a|b"}, "regex", "a|b"),
        ({"choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"structural_tag": {"structures": [], "triggers": []}}, "structural_tag", None),
    ],
)
def test_each_kind_has_one_text(fields: dict[str, Any], kind: str, text: str | None) -> None:
    found = SamplingParams(structured_outputs=fields).structured_outputs
    assert found == StructuredOutputs(**fields)
    assert found.kind == kind
    assert text is None or found.text == text
    assert pickle.loads(pickle.dumps(found)).key == found.key


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({}, "gives nothing"),
        ({"json": {}, "regex": "a"}, "gives json and regex"),
        ({"json_object": False}, "gives nothing"),
        ({"json": False}, "json must be a JSON table"),
        ({"json_object": "yes"}, "json_object must be True"),
        ({"json": "{"}, "json is no JSON"),
        ({"json": "[1]"}, "json must be a JSON table"),
        ({"json": {"a": {1, 2}}}, "json is no JSON"),
        ({"json": {"a": float("nan")}}, "json is no JSON"),
        ({"json": nested(MAX_DEPTH + 1)}, f"deeper than {MAX_DEPTH}"),
        ({"json": "[" * 100_000}, "json is no JSON"),
        ({"json": '{"a": "' + "b" * MAX_CHARS + '"}'}, f"at most {MAX_CHARS}"),
        ({"regex": ""}, "regex is ''"),
        ({"regex": "a\0b"}, "without NUL"),
        ({"regex": "a" * (MAX_CHARS + 1)}, f"at most {MAX_CHARS}"),
        ({"choice": []}, "choice must be a list"),
        ({"choice": "ab"}, "choice must be a list"),
        ({"choice": ["a", 1]}, "choice is 1"),
        ({"grammar": 5}, "grammar is 5"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace must be"),
        ({"json": {}, "whitespace_pattern": ""}, "whitespace_pattern is ''"),
        ({"regex": "a", "until": "b"}, "until is 'b'.*which JSON has not"),
        ({"jsn": {}}, "must have fields among json, "),
        ("json", "must have fields among"),
    ],
)
def test_what_cannot_work_is_named(fields: Any, match: str) -> None:
    with pytest.raises(InvalidSamplingParams, match=match):
        SamplingParams(structured_outputs=fields)


def test_without_the_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidSamplingParams, match="pip install llguidance"):
        SamplingParams(structured_outputs={"regex": "a"})
