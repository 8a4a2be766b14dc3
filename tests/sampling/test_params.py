from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest

from nanoengine.core.errors import InvalidSamplingParams, NanoEngineError
from nanoengine.core.sampling_params import MAX_COMPLETIONS
from nanoengine.sampling.bad_word_tokens import MAX_BAD_WORDS
from nanoengine.sampling.params import LEAST_REPETITION_PENALTY, MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams

FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
INTEGERS = ["top_k", "n", "best_of", "min_tokens", "max_tokens", "seed", "logprobs", "prompt_logprobs"]


def test_defaults_sample_from_the_whole_distribution() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.seed, params.max_tokens, params.min_tokens, params.n) == (None, 64, 0, 1)
    assert (params.stop, params.stop_token_ids, params.ignore_eos, params.logprobs) == ((), (), False, None)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.logit_bias, params.allowed_token_ids, params.bad_words, params.prompt_logprobs) == (
        (),
        None,
        (),
        None,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 100.0),
        ("top_k", -1),
        ("top_k", 0),
        ("top_k", 10**6),
        ("top_p", 1e-9),
        ("top_p", 1),
        ("min_p", 0.0),
        ("min_p", 1.0),
        ("seed", None),
        ("seed", 0),
        ("seed", -(2**63)),
        ("seed", 2**64 - 1),
        ("max_tokens", 1),
        ("max_tokens", None),
        ("min_tokens", 64),
        ("n", 1),
        ("n", 16),
        ("logprobs", None),
        ("logprobs", 0),
        ("logprobs", MAX_LOGPROBS),
        ("prompt_logprobs", None),
        ("prompt_logprobs", 0),
        ("prompt_logprobs", MAX_LOGPROBS),
        ("top_k", 2**31 - 1),
        ("max_tokens", 2**31 - 1),
        ("presence_penalty", -2.0),
        ("presence_penalty", 2),
        ("frequency_penalty", -2),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", LEAST_REPETITION_PENALTY),
        ("repetition_penalty", 2),
        ("allowed_token_ids", None),
        ("allowed_token_ids", (0,)),
        ("bad_words", ("a",)),
        ("n", MAX_COMPLETIONS),
        ("stop_token_ids", (0,)),
        ("ignore_eos", True),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("speculate", False),
    ],
)
def test_values_at_the_limits_are_allowed(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("temperature", -0.1, "at most 100"),
        ("temperature", 100.5, "at most 100"),
        ("temperature", math.inf, "at most 100"),
        ("temperature", math.nan, "at least 0"),
        ("top_p", 0.0, "above 0"),
        ("top_p", -0.5, "above 0"),
        ("top_p", 1.01, "at most 1"),
        ("top_p", math.nan, "at most 1"),
        ("min_p", -0.01, "at least 0"),
        ("min_p", 1.01, "at most 1"),
        ("top_k", -2, "between -1"),
        ("top_k", 2**31, "between -1"),
        ("n", 0, "between 1"),
        ("n", -1, "between 1"),
        ("n", MAX_COMPLETIONS + 1, str(MAX_COMPLETIONS)),
        ("min_tokens", -1, "between 0"),
        ("min_tokens", 2**31, "between 0"),
        ("max_tokens", 0, "between 1"),
        ("max_tokens", -5, "between 1"),
        ("max_tokens", 2**31, "between 1"),
        ("seed", 2**64, "between"),
        ("seed", -(2**63) - 1, "between"),
        ("logprobs", -1, "between 0"),
        ("logprobs", MAX_LOGPROBS + 1, str(MAX_LOGPROBS)),
        ("prompt_logprobs", -1, "between 0"),
        ("prompt_logprobs", MAX_LOGPROBS + 1, str(MAX_LOGPROBS)),
        ("presence_penalty", -2.1, "at least -2"),
        ("presence_penalty", 2.1, "at most 2"),
        ("presence_penalty", math.nan, "at most 2"),
        ("frequency_penalty", -2.1, "at least -2"),
        ("frequency_penalty", math.inf, "at most 2"),
        ("repetition_penalty", 0.0, "at least 1e-05"),
        ("repetition_penalty", 1e-50, "at least 1e-05"),  # 0 in float32
        ("repetition_penalty", 2.1, "at most 2"),
        ("repetition_penalty", math.nan, "at most 2"),
    ],
)
def test_a_value_outside_its_range_names_field_value_and_limit(field: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidSamplingParams) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value).startswith(f"{field} is {value}:")
    assert limit in str(caught.value)


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize("value", ["0.5", None, True, [1.0], 1j])
def test_a_number_of_the_wrong_type_is_an_error(field: str, value: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match=f"^{field} must be a number, not "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", ["1", 1.0, True, [1]])
def test_an_integer_of_the_wrong_type_is_an_error(field: str, value: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match=f"^{field} must be an integer, not "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", ["top_k", "n", "min_tokens"])
def test_an_integer_that_is_not_optional_cannot_be_none(field: str) -> None:
    with pytest.raises(InvalidSamplingParams, match=field):
        SamplingParams(**{field: None})


def test_min_tokens_above_max_tokens_is_an_error_that_names_both() -> None:
    with pytest.raises(InvalidSamplingParams, match="min_tokens is 5, but max_tokens is 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_min_tokens_needs_no_max_tokens() -> None:
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500


@pytest.mark.parametrize(
    ("stop", "kept"), [("END", ("END",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ()), (None, ())]
)
def test_stops_are_kept_as_a_tuple(stop: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop == kept


@pytest.mark.parametrize("stop", [[""], ["a", ""], [5], [None], b"ab"])
def test_every_stop_is_a_string_with_characters(stop: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match="stop holds"):
        SamplingParams(stop=stop)


def test_an_empty_stop_string_is_an_error() -> None:
    with pytest.raises(InvalidSamplingParams, match="stop"):
        SamplingParams(stop="")


@pytest.mark.parametrize("stop", [0, 5, 1.5, False, True])
def test_stop_that_is_neither_a_string_nor_strings_is_an_error(stop: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match="stop"):
        SamplingParams(stop=stop)


def test_stop_token_ids_are_kept_as_a_tuple() -> None:
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()


@pytest.mark.parametrize("token", [-1, "1", 1.0, None, True])
def test_every_stop_token_id_is_a_token_id(token: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match="stop_token_ids"):
        SamplingParams(stop_token_ids=[5, token])


@pytest.mark.parametrize("ids", [0, 7, 1.5, False])
def test_stop_token_ids_that_are_no_list_are_an_error(ids: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match="stop_token_ids"):
        SamplingParams(stop_token_ids=ids)


@pytest.mark.parametrize("field", ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "speculate"])
@pytest.mark.parametrize("value", ["no", 1, None])
def test_some_values_are_true_or_false(field: str, value: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match=f"{field} must be True or False, not {value!r}"):
        SamplingParams(**{field: value})


def test_stops_and_special_tokens_are_no_text_unless_a_request_says_so() -> None:
    params = SamplingParams()
    assert (params.include_stop_str_in_output, params.skip_special_tokens) == (False, True)


def test_guesses_are_made_unless_a_request_says_no() -> None:
    assert SamplingParams().speculate is True


def test_later_changes_to_a_callers_list_change_nothing() -> None:
    stop = ["a"]
    params = SamplingParams(stop=stop)
    stop.append("b")
    assert params.stop == ("a",)


def test_params_are_values() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"])
    assert params == SamplingParams(temperature=0.5, stop="a")
    assert len({params, SamplingParams(temperature=0.5, stop="a")}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0


def test_a_replaced_field_is_checked_too() -> None:
    with pytest.raises(InvalidSamplingParams, match="top_p"):
        dataclasses.replace(SamplingParams(), top_p=2.0)


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_integers_of_numpy_become_plain_ones(dtype: Any) -> None:
    params = SamplingParams(
        **{field: dtype(7) for field in INTEGERS},
        stop_token_ids=np.array([3, 4], dtype=dtype),
        allowed_token_ids=[dtype(5)],
        logit_bias={dtype(6): 1},
    )
    assert params == SamplingParams(
        **dict.fromkeys(INTEGERS, 7), stop_token_ids=(3, 4), allowed_token_ids=(5,), logit_bias={6: 1}
    )
    numbers = [
        *(getattr(params, field) for field in INTEGERS),
        *params.stop_token_ids,
        *(params.allowed_token_ids or ()),
    ]
    assert all(type(number) is int for number in (*numbers, *dict(params.logit_bias)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int64, int])
def test_numbers_of_other_kinds_become_plain_floats(dtype: Any) -> None:
    params = SamplingParams(**{field: dtype(1) for field in FLOATS}, logit_bias={3: dtype(-2)})
    assert params == SamplingParams(**dict.fromkeys(FLOATS, 1.0), logit_bias={3: -2.0})
    assert all(type(getattr(params, field)) is float for field in FLOATS)
    assert type(dict(params.logit_bias)[3]) is float


@pytest.mark.parametrize("value", [np.bool_(True), np.array([1, 2]), np.str_("1"), np.datetime64(1, "s")])
def test_what_is_no_number_in_numpy_is_none_here(value: Any) -> None:
    for field in (*FLOATS, *INTEGERS):
        with pytest.raises(InvalidSamplingParams, match=f"^{field} must be"):
            SamplingParams(**{field: value})


def test_a_number_too_large_for_a_float_is_outside_of_every_range() -> None:
    with pytest.raises(InvalidSamplingParams, match="temperature is 1000"):
        SamplingParams(temperature=10**400)


def test_params_with_everything_are_plain_data() -> None:
    params = SamplingParams(
        logit_bias={5: 1.5, 3: -100},
        allowed_token_ids=[1, 2, 1],
        bad_words=["b", "a", "b"],
        stop_token_ids=[4, 4, 2],
        prompt_logprobs=2,
        repetition_penalty=1.1,
    )
    assert params.logit_bias == ((3, -100.0), (5, 1.5))
    assert params.allowed_token_ids == (1, 2)
    assert params.bad_words == ("b", "a")
    assert params.stop_token_ids == (4, 2)
    assert pickle.loads(pickle.dumps(params)) == params == dataclasses.replace(params)
    assert len({params, dataclasses.replace(params)}) == 1


def test_the_order_of_a_bias_is_of_no_account() -> None:
    assert SamplingParams(logit_bias={1: 2, 3: 4}) == SamplingParams(logit_bias={3: 4, 1: 2})
    assert SamplingParams(logit_bias=None).logit_bias == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({5: 100.5}, "bias of token 5 is 100.5"),
        ({5: -100.5}, "bias of token 5 is -100.5"),
        ({5: math.nan}, "bias of token 5 is nan"),
        ({5: -math.inf}, "bias of token 5 is -inf"),
        ({5: "1"}, "bias of token 5 must be a number"),
        ({"5": 1}, "token id must be an integer, not '5'"),
        ({-1: 1}, "token id is -1"),
        ({2**31: 1}, "token id is 2147483648"),
        ({1.0: 1}, "token id must be an integer"),
        ([(1, 1), (1, 2)], "token id 1 twice"),
        ([1, 2], "holds 1: it must be"),
        (5, "must be a list, not 5"),
        (dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0), f"at most {MAX_LOGIT_BIAS}"),
    ],
)
def test_a_logit_bias_out_of_order_is_an_error(bias: Any, message: str) -> None:
    with pytest.raises(InvalidSamplingParams, match=r"^logit_bias") as caught:
        SamplingParams(logit_bias=bias)
    assert message in str(caught.value)


def test_to_allow_nothing_is_an_error() -> None:
    with pytest.raises(InvalidSamplingParams, match="allowed_token_ids is empty"):
        SamplingParams(allowed_token_ids=[])


@pytest.mark.parametrize("ids", [[-1], [2**31], ["1"], [1.5], [True], 7, "12", [None]])
def test_allowed_token_ids_are_token_ids(ids: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match=r"^allowed_token_ids"):
        SamplingParams(allowed_token_ids=ids)


@pytest.mark.parametrize("words", [[""], ["a", ""], [5], [None], "word", 7])
def test_bad_words_are_strings(words: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match=r"^bad_words"):
        SamplingParams(bad_words=words)


def test_there_are_not_too_many_bad_words() -> None:
    words = [f"word {i}" for i in range(MAX_BAD_WORDS)]
    assert len(SamplingParams(bad_words=words * 2).bad_words) == MAX_BAD_WORDS
    with pytest.raises(
        InvalidSamplingParams, match=f"bad_words holds {MAX_BAD_WORDS + 1} words: at most {MAX_BAD_WORDS}"
    ):
        SamplingParams(bad_words=[*words, "one more"])


@pytest.mark.parametrize("kind", [ValueError, NanoEngineError])
def test_the_error_can_be_caught_as(kind: type[Exception]) -> None:
    with pytest.raises(kind):
        SamplingParams(n=0)


# ---- best_of


def test_without_best_of_all_completions_are_reported() -> None:
    assert SamplingParams(n=3).best_of is None
    assert SamplingParams(n=3).num_sequences == 3


def test_best_of_makes_more_completions_than_it_reports() -> None:
    assert SamplingParams(n=2, best_of=5).num_sequences == 5
    assert SamplingParams(n=2, best_of=2).num_sequences == 2


@pytest.mark.parametrize(("n", "best_of"), [(2, 1), (1, 0), (1, -1), (5, 4)])
def test_best_of_below_n_is_refused(n: int, best_of: int) -> None:
    with pytest.raises(InvalidSamplingParams, match="best_of"):
        SamplingParams(n=n, best_of=best_of)


@pytest.mark.parametrize("value", ["3", 3.0, True, 10**9, math.nan])
def test_best_of_is_an_integer_within_reason(value: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match="best_of"):
        SamplingParams(best_of=value)


@pytest.mark.parametrize(
    ("logprobs", "best_of", "needed"), [(None, None, None), (None, 2, 0), (3, None, 3), (3, 2, 3), (0, None, 0)]
)
def test_best_of_needs_the_log_probability_of_what_was_chosen(
    logprobs: int | None, best_of: int | None, needed: int | None
) -> None:
    assert SamplingParams(logprobs=logprobs, best_of=best_of).num_logprobs == needed
