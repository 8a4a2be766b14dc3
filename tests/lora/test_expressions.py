"""Expressions of strangers: those that end are matched as PEFT does it, all others end with their process."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.lora.expressions import answer, first_matches

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.mlp.down_proj",
    "lm_head",
    "model.layers.10.self_attn.q_proj",
]
PIECES = [
    "q_proj",
    "layers",
    r"\d+",
    ".*",
    r"\.",
    "^model",
    "(0|1)",
    "(?!lm)",
    "[a-z_]+",
    "$",
    "|",
    "(?:",
    ")",
    "(",
    "\\",
]


@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=5).map("".join), max_size=3))
@settings(max_examples=100, deadline=None)
def test_expressions_match_as_in_peft(keys: list[str]) -> None:
    """Those that the config has, as `peft.utils.other.get_pattern_key` says, and those that are none are told."""
    found = answer([[rf"(?:(.*\.)?({key})$)(?s:.*)" for key in keys]], NAMES)
    try:
        tries = [re.compile(rf"(.*\.)?({key})$") for key in keys]
    except re.error:
        assert isinstance(found, str)
    else:
        assert found == [[next((i for i, own in enumerate(tries) if own.match(name)), None) for name in NAMES]]


def test_expressions_have_a_limit_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoengine.lora.expressions.MAX_SECONDS", 1)
    with pytest.raises(ValueError, match=r"more than 1 s or 1 GiB"):
        first_matches([["(a*)*b"]], ["a" * 50])
