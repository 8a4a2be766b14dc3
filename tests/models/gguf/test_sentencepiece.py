"""Pairs of SentencePiece tokens that merge: those that a search through all cuts finds, in its order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.models.gguf import sentencepiece
from nanoengine.models.gguf.sentencepiece import find_merges

CHARACTERS = "ab\0\x01▁\U0001f600"


def merges(tokens: list[str]) -> list[tuple[str, str]]:
    return [pair for some in find_merges(tokens) for pair in some]


def searched(tokens: list[str]) -> list[tuple[str, str]]:
    vocab = set(tokens)
    cuts = [(token[:i], token[i:]) for token in tokens for i in range(1, len(token))]
    return [pair for pair in cuts if vocab.issuperset(pair)]


@given(st.lists(st.text(CHARACTERS, min_size=1, max_size=6), min_size=1, max_size=60, unique=True))
def test_pairs_are_those_of_a_search_through_all_cuts(tokens: list[str]) -> None:
    assert merges(tokens) == searched(tokens)


def test_tokens_of_one_batch_merge_into_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ["abc", "ab", "bc", "a", "b", "c", "cab"]
    result = merges(tokens)
    monkeypatch.setattr(sentencepiece, "BATCH", 2)
    assert merges(tokens) == result == searched(tokens)
    assert result[:2] == [("a", "bc"), ("ab", "c")]


def test_pairs_are_the_strings_of_the_vocabulary() -> None:
    """A large vocabulary has half a million of them."""
    tokens = ["".join(parts) for parts in (("aa", "bb"), ("a", "a"), ("b", "b"))]
    ((first, second),) = merges(tokens)
    assert (first, second) == ("aa", "bb")
    assert first is tokens[1]
    assert second is tokens[2]
