"""A growing text is cut where its markdown is final."""

from __future__ import annotations

import pytest

from nanoengine.serve.chat.markdown import final_length, printable


@pytest.mark.parametrize(
    ("head", "tail"),
    [
        ("", ""),
        ("", "one\ntwo\n"),
        ("", "one\n\n"),
        ("one\n\n", "t"),
        ("one\n\ntwo\n\n\n", "three\nfour"),
        ("", "```\na\n\nb\n"),
        ("```python\na\n\nb\n```\n\n", "c"),
        ("", "````\n```\n\nb\n```\n\nc\n"),
        ("~~~\n\n```\n~~~\n\n", "c"),
        ("", "- one\n\n  still one\n"),
        ("- one\n\n  still one\n\n", "text"),
    ],
)
def test_a_block_is_final_when_the_next_has_begun(head: str, tail: str) -> None:
    assert final_length(head + tail) == len(head)


def test_what_was_final_stays_final() -> None:
    text = "# a\n\nb\n```\nc\n\nd\n```\n\n1. e\n\n2. f\n\n   g\n\nh"
    places = [final_length(text[:size]) for size in range(len(text) + 1)]
    assert places == sorted(places)
    assert text[: places[-1]].endswith("   g\n\n")


def test_a_terminal_is_given_nothing_to_obey() -> None:
    assert printable("a\033[2Jb\rc\n\td\x9b1me\x00ä→") == "a[2Jbc\n\td1meä→"
