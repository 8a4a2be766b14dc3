"""Merges of SentencePiece vocabularies: BPE makes the same tokens with them as with all pairs of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from nanoengine.models.gguf import token_hashes
from nanoengine.models.gguf.sentencepiece import find_merges

CHARACTERS = "ab\0\x01▁\U0001f600"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def all_pairs(tokens: Sequence[str]) -> list[tuple[str, str]]:
    vocab = set(tokens)
    cuts = [(token[:i], token[i:]) for token in tokens for i in range(1, len(token))]
    return [pair for pair in cuts if vocab.issuperset(pair)]


@st.composite
def trained(draw: st.DrawFn) -> list[str]:
    """Tokens as BPE is trained: each is made of two before it."""
    tokens = [*draw(st.sampled_from(["ab", "abc", CHARACTERS]))]
    for first, second in draw(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=40)):
        token = tokens[first % len(tokens)] + tokens[second % len(tokens)]
        if token not in tokens and len(token) < 12:
            tokens.append(token)
    return tokens


ANY = st.lists(st.text("ab<é▁", min_size=1, max_size=6), min_size=1, max_size=60, unique=True)
MORE = st.sampled_from([[], BYTES, [*BYTES, "<0xC3>a", "<0xC3><0xA9>", "a<0xC3>"], ["é", "aé", "<"]])


@given(st.one_of(trained(), ANY), MORE, st.sampled_from([None, "<unk>", "ab", "é"]), st.data())
@example(["a", "b", "c", "ab", "bc", "abc"], [], None, None)
@example([*"<0xA9>a", "<0", "<0x", "<0xA", "<0xA9", ">a", "<0xA9>a"], BYTES, None, None)
def test_bpe_makes_the_tokens_that_it_makes_of_all_pairs(
    tokens: list[str], more: list[str], unk_token: str | None, data: st.DataObject | None
) -> None:
    """In any order of merges, and with characters that begin as several tokens or as one that is unknown."""
    tokens = [*dict.fromkeys([*tokens, *more, *([unk_token] if unk_token else [])])]
    merges, pairs = find_merges(tokens, unk_token), all_pairs(tokens)
    remaining = iter(pairs)
    assert all(pair in remaining for pair in merges), "pairs of tokens, in their order"
    text = st.lists(st.one_of(st.sampled_from(tokens), st.text("ab<é▁c", max_size=9)), max_size=8).map("".join)
    texts = [*tokens, "éa", *(data.draw(st.lists(text, max_size=9)) if data else [])]
    options = {"vocab": {t: i for i, t in enumerate(tokens)}, "byte_fallback": True, "fuse_unk": True}
    ids = [
        [
            result.ids
            for result in Tokenizer(models.BPE(**options, unk_token=unk_token, merges=some)).encode_batch(texts)
        ]
        for some in (merges, pairs)
    ]
    assert ids[0] == ids[1]


def test_a_token_is_made_of_one_pair() -> None:
    """Of c + ab, ca + b and of the longer ones, only what BPE does remains."""
    tokens = [*"abc", "ab", "ca", "cab", "cabc", "abc", "cabcab", "caca", "cacab"]
    pairs = find_merges(tokens)
    assert len(all_pairs(tokens)) == 12
    texts = ["a b", "c a", "c ab", "cab c", "ab c", "cab cab", "ca ca", "ca cab"]
    assert pairs == [tuple(text.split()) for text in texts]


def test_batches_are_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ["abc", "ab", "bc", "a", "b", "c", "cab", "ca"]
    result = find_merges(tokens)
    monkeypatch.setattr(token_hashes, "BATCH", 1)
    assert find_merges(tokens) == result


def test_pairs_are_the_strings_of_the_vocabulary() -> None:
    """A large vocabulary has a quarter of a million of them."""
    tokens = ["".join(parts) for parts in (("aa", "bb"), ("a", "a"), ("b", "b"))]
    ((first, second),) = find_merges(tokens)
    assert (first, second) == ("aa", "bb")
    assert first is tokens[1]
    assert second is tokens[2]
