"""JSON: numbers of any size are read and written, and nothing else than JSON has."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.features.tool_calls.json_text import MAX_DIGITS, JsonPieces, dumps, loads
from tests.drawn import FAST

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda own: st.lists(own, max_size=3) | st.dictionaries(st.text(max_size=3), own, max_size=3),
    max_leaves=5,
)


@FAST
@given(VALUES)
def test_what_python_can_write_is_written_as_it_writes_it(value: Any) -> None:
    text = dumps(value)
    assert text == json.dumps(value, ensure_ascii=False)
    assert loads(text) == value
    assert loads(text, strict=True) == value


@pytest.mark.parametrize("number", ["1e999", "1E+400", "9" * 5000])
@pytest.mark.parametrize("sign", ["", "-"])
def test_a_number_beyond_floats_is_one(number: str, sign: str) -> None:
    value = loads(f'{{"Infinity": ["-Infinity, \\\\", {sign}{number}, "\\"Infinity"]}}')
    text = dumps(value)
    assert text == f'{{"Infinity": ["-Infinity, \\\\", {sign}1e999, "\\"Infinity"]}}'
    assert loads(text) == value
    assert bytes(msgspec.json.decode(text, type=msgspec.Raw)) == text.encode()


def test_long_integers_are_exact() -> None:
    text = "-" + "7" * (MAX_DIGITS - 1)
    assert dumps(loads(text)) == text


def test_half_a_pair_is_escaped() -> None:
    assert dumps([loads('"\\ud800é"'), float("inf")]) == '["\\ud800\\u00e9", 1e999]'


@pytest.mark.parametrize("text", ["NaN", "Infinity", "[-Infinity]", "True", "1e", ""])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        loads(text)


def test_small_models_do_not_escape_line_breaks() -> None:
    assert loads('"a\nb"') == "a\nb"
    with pytest.raises(ValueError, match="control character"):
        loads('"a\nb"', strict=True)


@FAST
@given(st.data())
def test_json_in_pieces_is_the_json_that_was_written(data: st.DataObject) -> None:
    """But for line breaks in strings, which are escaped, and numbers that no float can be."""
    parts = [*'[]{}"\\\n', "\\n", "\t ", "a", ": ", ", ", "1e", "999", "-", "9" * 5000, "0.5", "true"]
    drawn = st.lists(st.sampled_from(parts)).map("".join) | VALUES.map(dumps).map(lambda own: own.replace("\\n", "\n"))
    text = data.draw(drawn)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = JsonPieces()
    told = [pieces.push(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert "".join(told) == JsonPieces().push(text)
    try:
        value = loads(text)
    except ValueError:
        return
    if text.rstrip()[-1:] in ("]", "}", '"'):
        assert repr(loads("".join(told), strict=True)) == repr(value)
