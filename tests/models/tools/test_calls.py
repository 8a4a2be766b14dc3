"""Where JSON ends in a text that comes in pieces."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nanoengine.models.tools.calls import JsonEnd, Outcome
from tests.drawn import FAST

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda own: st.lists(own, max_size=3) | st.dictionaries(st.text(max_size=3), own, max_size=3),
)
TABLES = st.lists(VALUES, max_size=3) | st.dictionaries(st.text(max_size=3), VALUES, max_size=3)


@FAST
@given(TABLES, st.booleans(), st.text(max_size=5))
def test_the_end_of_json_is_found_however_it_comes(value: Any, ascii: bool, behind: str) -> None:
    text = json.dumps(value, ensure_ascii=ascii)
    assert JsonEnd().find(text + behind, 0) == (Outcome.WHOLE, len(text))
    own = JsonEnd()
    for at, character in enumerate(text):
        assert own.find(character, 0) == (Outcome.WHOLE if at == len(text) - 1 else Outcome.MORE, 1)


def test_what_cannot_be_json_is_told() -> None:
    assert JsonEnd().find("{'a'", 0) == (Outcome.TEXT, 1)
    assert JsonEnd().find('xx{"a": <', 2) == (Outcome.TEXT, 8)
