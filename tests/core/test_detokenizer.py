"""The text of a completion grows token by token, and no character is taken back."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from nanoengine.core.detokenizer import Detokenizer

PIECES = ["a", " b", "\u00e9", "\U0001f600", "\ufffd"]


@given(st.lists(st.one_of(st.sampled_from([piece.encode() for piece in PIECES]), st.binary(min_size=1, max_size=3))))
def test_text_only_grows_and_ends_as_all_tokens_together(pieces: list[bytes]) -> None:
    def decode(ids: Sequence[int]) -> str:
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    detokenizer, before = Detokenizer(decode), ""
    for token in range(len(pieces)):
        assert detokenizer.push(token) is None
        assert detokenizer.text.startswith(before)
        before = detokenizer.text
    detokenizer.finish()
    assert detokenizer.text == decode(range(len(pieces)))
    assert detokenizer.text.startswith(before)
    assert detokenizer.text_from(2) == detokenizer.text[2:]
