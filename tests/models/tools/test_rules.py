"""Texts and marks in a grammar."""

from __future__ import annotations

from nanoengine.models.tools.rules import Rules

IDS = {"<a>": 7, "<b>": 8}


def test_marks_that_are_tokens_are_written_as_such() -> None:
    rules = Rules(IDS.get)
    assert rules.say("x", "y", "<a>", "", "z") == '"xy" <[7]> "z"'
    assert rules.say() == rules.say("") == ""
    assert rules.say("<a>", "<b>") == "<[7]> <[8]>"


def test_a_mark_may_come_either_way() -> None:
    rules = Rules(IDS.get)
    assert rules.up_to("x", "<a>", "<c>") == "(x | TEXT <[7]>)"
    assert rules.rules["x[lazy]"] == 'TEXT ("<a>" | "<c>")'


def test_equal_terminals_have_one_name() -> None:
    rules = Rules(IDS.get)
    first, second = rules.terminal("/a/"), rules.terminal("/b/")
    assert first != second
    assert rules.terminal("/a/") == first
    assert f"{second}: /b/" in rules.text()
