from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from nanoengine.errors import InvalidSamplingParams, NanoEngineError
from nanoengine.sampling_params import MAX_COMPLETIONS, MAX_LOGPROBS, SamplingParams


def test_defaults_sample_from_the_whole_distribution() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.seed, params.max_tokens, params.min_tokens, params.n) == (None, 64, 0, 1)
    assert (params.stop, params.stop_token_ids, params.ignore_eos, params.logprobs) == ((), (), False, None)


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
        ("n", MAX_COMPLETIONS),
        ("stop_token_ids", (0,)),
        ("ignore_eos", True),
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
        ("top_k", -2, "at least -1"),
        ("n", 0, "between 1"),
        ("n", -1, "between 1"),
        ("n", MAX_COMPLETIONS + 1, str(MAX_COMPLETIONS)),
        ("min_tokens", -1, "at least 0"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -5, "at least 1"),
        ("seed", 2**64, "between"),
        ("seed", -(2**63) - 1, "between"),
        ("logprobs", -1, "between 0"),
        ("logprobs", MAX_LOGPROBS + 1, str(MAX_LOGPROBS)),
    ],
)
def test_a_value_outside_its_range_names_field_value_and_limit(field: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidSamplingParams) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value).startswith(f"{field} is {value}:")
    assert limit in str(caught.value)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", ["0.5", None, True, [1.0], 1j])
def test_a_number_of_the_wrong_type_is_an_error(field: str, value: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match=f"^{field} must be a number, not "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", ["top_k", "n", "min_tokens", "max_tokens", "seed", "logprobs"])
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


@pytest.mark.parametrize("value", ["no", 1, None])
def test_ignore_eos_is_true_or_false(value: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match="ignore_eos"):
        SamplingParams(ignore_eos=value)


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


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (0.0, True), (0.01, False), (1.0, False)])
def test_temperature_zero_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


@pytest.mark.parametrize("kind", [ValueError, NanoEngineError])
def test_the_error_can_be_caught_as(kind: type[Exception]) -> None:
    with pytest.raises(kind):
        SamplingParams(n=0)
