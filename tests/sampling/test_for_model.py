"""What can be checked of params only beside a model and its tokenizer, and the tokens of bad words."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

import pytest

from nanoengine.core.errors import InvalidPrompt, InvalidSamplingParams
from nanoengine.sampling.bad_word_tokens import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, bad_word_tokens
from nanoengine.sampling.params import SamplingParams


class Model:
    """Ten tokens, of which 2 ends a text; a word is a list of digits."""

    vocab_size, max_model_len, eos_token_ids = 10, 100, (2,)

    def encode(self, text: str) -> list[int]:
        return [int(letter) for letter in text.strip()]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, None),
        ({"stop_token_ids": [9], "logit_bias": {9: 1}, "allowed_token_ids": [0, 9]}, None),
        ({"min_tokens": 99, "max_tokens": None}, None),
        ({"top_k": 2**31 - 1, "max_tokens": 2**31 - 1}, None),
        ({"stop_token_ids": [3, 10]}, "stop_token_ids holds 10: the vocabulary has 10 tokens"),
        ({"logit_bias": {10: 1.0}}, "logit_bias holds 10: the vocabulary has 10 tokens"),
        ({"allowed_token_ids": [10]}, "allowed_token_ids holds 10: the vocabulary has 10 tokens"),
        ({"min_tokens": 100, "max_tokens": None}, "min_tokens is 100, but max_model_len.* is 100"),
    ],
    ids=str,
)
def test_what_the_model_cannot_hold_is_named(params: dict[str, Any], message: str | None) -> None:
    own = SamplingParams(**params)
    if message is None:
        assert own.for_model(Model()) is own
        return
    with pytest.raises(InvalidSamplingParams, match=message):
        own.for_model(Model())


@pytest.mark.parametrize(
    ("params", "fine"),
    [
        ({"allowed_token_ids": [2, 3], "min_tokens": 1}, False),  # both end the sequence
        ({"allowed_token_ids": [2, 3], "min_tokens": 1, "ignore_eos": True}, True),
        ({"allowed_token_ids": [2, 3]}, True),  # and may
        ({"allowed_token_ids": [2, 3, 4], "min_tokens": 1}, True),
        ({"allowed_token_ids": [2, 3, 4], "min_tokens": 1, "bad_words": ["4"]}, False),
        (
            {"allowed_token_ids": [2, 3, 4], "min_tokens": 1, "bad_words": ["44", "14"]},
            True,
        ),  # only behind other tokens
        ({"allowed_token_ids": [4, 5], "bad_words": list("456")}, False),
        ({"bad_words": list("0123456789")}, False),
        ({"bad_words": list("012345678")}, True),
        ({"min_tokens": 1, "bad_words": list("01456789")}, False),
    ],
    ids=str,
)
def test_params_that_leave_nothing_to_sample_from_are_an_error(params: dict[str, Any], fine: bool) -> None:
    own = SamplingParams(stop_token_ids=[3], **params)
    if fine:
        own.for_model(Model())
        return
    with pytest.raises(InvalidSamplingParams, match="bad_words and min_tokens forbid each of the"):
        own.for_model(Model())


def test_params_know_the_tokens_of_their_words_and_stay_the_same_value() -> None:
    own = SamplingParams(bad_words=["12", "3"])
    found = own.for_model(Model())
    assert found == own
    assert found.bad_word_tokens == ((1, 2), (3,))
    assert pickle.loads(pickle.dumps(found)).bad_word_tokens == found.bad_word_tokens
    assert own.bad_word_tokens == (), "another model has other tokens"
    assert dataclasses.replace(found, bad_words=["4"]).bad_word_tokens == ()


# ---- bad words


class Letters:
    """A token for each letter, and one for each pair of a space and a letter; a start and an end of text, if any."""

    def __init__(self, start: tuple[int, ...] = (), end: tuple[int, ...] = ()):
        self.start, self.end = start, end

    def encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidPrompt("the prompt is not valid Unicode") from error
        ids, spaced = [], False
        for char in text:
            if char == " " and not spaced:
                spaced = True
                continue
            ids.append((200 if spaced else 100) + ord(char) % 100)
            spaced = False
        return [*self.start, *ids, *([99] if spaced else []), *self.end]


@pytest.mark.parametrize("start", [(), (1,), (1, 1)])
@pytest.mark.parametrize("end", [(), (2,), (1,)])
def test_words_are_resolved_with_and_without_a_space_before_them(start: tuple[int, ...], end: tuple[int, ...]) -> None:
    a, b = ord("a") % 100, ord("b") % 100
    words = bad_word_tokens(["ab", " b", "  a"], Letters(start, end).encode, 1000)
    assert words == ((100 + a, 100 + b), (200 + a, 100 + b), (100 + b,), (200 + b,), (100 + a,), (200 + a,))


@pytest.mark.parametrize("strips", [False, True], ids=["a token of its own", "changes nothing"])
def test_a_space_that_makes_no_other_first_token_makes_no_other_word(strips: bool) -> None:
    def encode(text: str) -> list[int]:
        return [ord(char) for char in (text.strip() if strips else text)]

    assert bad_word_tokens(["ab"], encode, 200) == ((97, 98),)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "   "], "'   ', which has no tokens"),
        (["\ud800"], "not valid Unicode"),
        ([f"{i:03}" for i in range(MAX_BAD_WORDS // 2 + 1)], f"which are 130 with .* at most {MAX_BAD_WORDS}"),
        (["a" * (MAX_BAD_WORD_TOKENS // 2 + 1)], f"words of 1026 tokens in all: at most {MAX_BAD_WORD_TOKENS}"),
        (["\xc7"], "'Ç' with token 299: the vocabulary has 299 tokens"),
    ],
)
def test_words_that_cannot_be_forbidden_are_errors(words: Sequence[str], message: str) -> None:
    with pytest.raises(InvalidSamplingParams, match=f"bad_words holds .*{message}"):
        bad_word_tokens(words, Letters().encode, 299)
