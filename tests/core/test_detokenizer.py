"""The text of a completion grows token by token, and no character is taken back."""

from __future__ import annotations

import random
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


def test_bytes_that_make_no_character_cost_the_same_for_each_token_and_are_shown() -> None:
    """But for the last three, of which a character may come yet. 2,000 tokens were decoded 2,005,000 times."""
    rng, num_decoded = random.Random(1), 0
    pieces = [bytes([rng.choice(b"\xe6\x97\xf0\x9f\xff")]) for _ in range(2000)]

    def decode(ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(ids)
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    detokenizer = Detokenizer(decode)
    for number in range(len(pieces)):
        detokenizer.read(range(number + 1))
        if number % 500 == 499:
            assert 0 <= len(decode(range(number + 1))) - len(detokenizer.text) <= 3
            num_decoded -= number + 1
    assert num_decoded < 100 * len(pieces)
