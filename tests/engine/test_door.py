"""What can be checked of params only beside a model and its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from nanoengine.engine.door import MAX_BAD_WORD_TOKENS, check_params, check_priority, resolve_bad_words
from nanoengine.errors import InvalidPrompt, InvalidRequest, InvalidSamplingParams, shown
from nanoengine.sampling_params import MAX_BAD_WORDS, BeamSearchParams, SamplingParams
from tests.engine.engine_toys import Script, make_engine

# ---- who asks


@pytest.mark.parametrize("priority", [0, -1, 2**63 - 1, -(2**63), np.int64(5)])
def test_a_priority_is_an_integer_of_64_bits(priority: Any) -> None:
    found = check_priority(priority)
    assert (found, type(found)) == (priority, int)


@pytest.mark.parametrize(
    "priority", [2**63, -(2**63) - 1, 10**9999, 1.0, True, "1", None, [0], float("nan")], ids=shown
)
def test_what_is_no_priority_is_named(priority: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^priority (is|must be)") as refused:
        check_priority(priority)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("field", ["cache_salt", "client"])
@pytest.mark.parametrize("name", ["a\n", "\ud800", b"a", None, 5, ["a"]])
def test_names_are_strings_of_printable_characters(field: str, name: Any) -> None:
    engine = make_engine(Script())
    with pytest.raises(InvalidRequest, match=rf"{field} is .*: it must be a string of printable characters"):
        engine.make_request("a", **{field: name})


def test_a_request_knows_its_place_and_its_client_and_so_do_its_sequences() -> None:
    engine = make_engine(Script())
    params = SamplingParams(n=2)
    requests = [engine.make_request("a", params), engine.make_request("a", params, priority=-3, client="Ann")]
    beams = engine.make_beam_request("a", BeamSearchParams(beam_width=2), priority=np.int64(4), client="Bob")
    for request in (*requests, beams):
        engine.submit(request)
    assert [(seq.order, seq.client) for seq in engine.scheduler.waiting] == [
        ((-3, 2), "Ann"),
        ((-3, 3), "Ann"),
        ((0, 0), ""),
        ((0, 1), ""),
        ((4, 4), "Bob"),
        ((4, 5), "Bob"),
    ]
    with pytest.raises(InvalidRequest, match="priority must be an integer"):
        engine.make_beam_request("a", BeamSearchParams(beam_width=2), priority=0.5)  # type: ignore[arg-type]


# ---- params


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"stop_token_ids": [9], "logit_bias": {9: 1}, "allowed_token_ids": [0, 9]},
        {"min_tokens": 99, "max_tokens": None},
        {"top_k": 2**31 - 1, "max_tokens": 2**31 - 1},
    ],
    ids=str,
)
def test_what_the_model_can_hold_passes(params: dict[str, Any]) -> None:
    check_params(SamplingParams(**params), 10, 100, stop_token_ids=[9])


@pytest.mark.parametrize(
    ("field", "value"), [("stop_token_ids", [3, 10]), ("logit_bias", {10: 1.0}), ("allowed_token_ids", [10])]
)
def test_token_ids_outside_of_the_vocabulary_are_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match=f"{field} holds 10: the vocabulary ends at 9"):
        check_params(SamplingParams(**{field: value}), 10, 100)


def test_a_min_tokens_that_no_sequence_reaches_is_an_error() -> None:
    with pytest.raises(InvalidSamplingParams, match=r"min_tokens is 100, but max_model_len.* is 100"):
        check_params(SamplingParams(min_tokens=100, max_tokens=None), 10, 100)


@pytest.mark.parametrize(
    ("params", "bad_words", "fine"),
    [
        ({"allowed_token_ids": [2, 3], "min_tokens": 1}, (), False),  # both end the sequence
        ({"allowed_token_ids": [2, 3]}, (), True),  # and may
        ({"allowed_token_ids": [2, 3, 4], "min_tokens": 1}, (), True),
        ({"allowed_token_ids": [2, 3, 4], "min_tokens": 1}, ((4,),), False),
        ({"allowed_token_ids": [2, 3, 4], "min_tokens": 1}, ((4, 4), (1, 4)), True),  # only behind other tokens
        ({"allowed_token_ids": [4, 5]}, ((4,), (5,), (6,)), False),
        ({}, tuple((token,) for token in range(10)), False),
        ({}, tuple((token,) for token in range(9)), True),
        ({"min_tokens": 1}, tuple((token,) for token in (0, 1, 4, 5, 6, 7, 8, 9)), False),
    ],
)
def test_params_that_leave_nothing_to_sample_from_are_an_error(
    params: dict[str, Any], bad_words: Sequence[Sequence[int]], fine: bool
) -> None:
    def check() -> None:
        check_params(SamplingParams(**params), 10, 100, stop_token_ids=(2, 3), bad_words=bad_words)

    if fine:
        check()
        return
    with pytest.raises(InvalidSamplingParams, match="bad_words and min_tokens forbid each of the"):
        check()


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
    words = resolve_bad_words(["ab", " b", "  a"], Letters(start, end), 1000)
    assert words == ((100 + a, 100 + b), (200 + a, 100 + b), (100 + b,), (200 + b,), (100 + a,), (200 + a,))


def test_a_space_that_becomes_a_token_of_its_own_makes_no_other_word() -> None:
    class SpaceIsAToken:
        def encode(self, text: str) -> list[int]:
            return [ord(char) for char in text]

    assert resolve_bad_words(["ab"], SpaceIsAToken(), 200) == ((97, 98),)


def test_a_space_that_changes_nothing_makes_no_other_word() -> None:
    class SpacesAreLost:
        def encode(self, text: str) -> list[int]:
            return [ord(char) for char in text.strip()]

    assert resolve_bad_words(["ab", "ab "], SpacesAreLost(), 200) == ((97, 98),)


def test_without_words_the_tokenizer_is_not_asked() -> None:
    assert resolve_bad_words((), None, 10) == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "   "], "'   ', which has no tokens"),
        (["\ud800"], "not valid Unicode"),
        ([f"{i:03}" for i in range(MAX_BAD_WORDS // 2 + 1)], f"which are 130 with .* at most {MAX_BAD_WORDS}"),
        (["a" * (MAX_BAD_WORD_TOKENS // 2 + 1)], f"words of 1026 tokens in all: at most {MAX_BAD_WORD_TOKENS}"),
    ],
)
def test_words_that_cannot_be_forbidden_are_errors(words: list[str], message: str) -> None:
    with pytest.raises(InvalidSamplingParams, match=f"bad_words holds .*{message}"):
        resolve_bad_words(words, Letters(), 1000)


def test_tokens_that_the_model_does_not_have_are_an_error() -> None:
    with pytest.raises(InvalidSamplingParams, match="'z' with token 222: the vocabulary ends at 199"):
        resolve_bad_words(["z"], Letters(), 200)
