"""Marks in a text that comes in pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nanoengine.models.tools.marks import Marks, past_space
from tests.drawn import FAST

TEXTS = st.text("ab<", max_size=12)


@FAST
@given(st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3), TEXTS, TEXTS)
def test_what_is_free_of_marks_stays_so(marks: list[str], text: str, more: str) -> None:
    own = Marks(marks)
    match, free = own.find(text, 0, is_last=False)
    later, _ = own.find(text + more, 0, is_last=True)
    assert later is None or later.start() >= free
    if match is not None:
        assert later is not None
        assert (later.start(), match.start()) == (free, free)
    if not any(mark.startswith(text[at:]) for mark in marks for at in range(len(text))):
        assert free == len(text) or match is not None  # nothing is held without need


def test_the_longest_of_two_marks_is_found() -> None:
    match, _ = Marks(["<a", "<ab"]).find("x<ab", 0, is_last=True)
    assert match is not None
    assert match[0] == "<ab"


def test_space_is_passed() -> None:
    assert past_space("a \n;b", 1) == 3
    assert past_space("a \n;b", 1, ";") == 4
    assert past_space(" ", 0) == past_space(" ", 1) == 1
