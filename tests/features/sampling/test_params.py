"""SamplingParams: what is kept of each field, and what is refused by field, value and limit."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from typing import Any

import numpy as np
import pytest

from nanoengine.core.errors import InvalidSamplingParams, NanoEngineError
from nanoengine.core.sampling_params import MAX_COMPLETIONS, MAX_INT32
from nanoengine.features.sampling.params import (
    LEAST_REPETITION_PENALTY,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    SamplingParams,
)

FLOATS: dict[str, tuple[float, float, float]] = {  # the least value, the largest, and one that is less than the least
    "temperature": (0, 100.0, -0.1),
    "top_p": (0.0, 1, -0.1),
    "min_p": (0.0, 1.0, -0.01),
    "presence_penalty": (-2.0, 2, -2.1),
    "frequency_penalty": (-2, 2.0, -2.1),
    "repetition_penalty": (LEAST_REPETITION_PENALTY, 2, 1e-50),  # 0 in float32
}
INTEGERS = {
    "top_k": (-1, MAX_INT32),
    "n": (1, MAX_COMPLETIONS),
    "best_of": (1, MAX_COMPLETIONS),
    "min_tokens": (0, MAX_INT32),
    "max_tokens": (1, MAX_INT32),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}


def refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidSamplingParams, match=f"^{field}") as caught:
        SamplingParams(**{"max_tokens": None, field: value})
    assert re.search(message, str(caught.value))


def test_a_top_p_of_zero_is_greedy() -> None:
    """So is one that float32 does not know from 0."""
    assert [SamplingParams(temperature=2, top_p=value).temperature for value in (0, 1e-46, 1e-9)] == [0, 0, 2]


@pytest.mark.parametrize("field", FLOATS)
def test_a_number_is_within_its_limits(field: str) -> None:
    *allowed, below = FLOATS[field]
    for value in (*allowed, *map(int, allowed[1:]), *(kind(1) for kind in (np.float16, np.float32, np.int64))):
        found = getattr(SamplingParams(**{field: value}), field)
        assert found == value
        assert type(found) is float
    must = f"it must be a number from {allowed[0]:g} to {allowed[1]:g}"
    for value in (below, math.nextafter(allowed[1], 999), math.inf, math.nan):
        refused(field, value, f"^{field} is {re.escape(str(value))}: {must}")
    refused(field, 10**400, f"{field} is 1000")
    for value in ("0.5", None, True, [1.0], 1j, np.bool_(True), np.array([1, 2]), np.str_("1"), np.datetime64(1, "s")):
        refused(field, value, f"^{field} is .*: it must be a number from ")


@pytest.mark.parametrize("field", INTEGERS)
def test_an_integer_is_within_its_limits(field: str) -> None:
    low, high = INTEGERS[field]
    for value in (low, high, *(kind(7) for kind in (np.int32, np.int64, np.uint8))):
        found = getattr(SamplingParams(**{"max_tokens": None, field: value}), field)
        assert found == value
        assert type(found) is int
    for value in (low - 1, high + 1):
        refused(field, value, f"^{field} is {value}: it must be an integer from {low} to {high}")
    for value in ("1", 1.0, True, [1], math.nan, np.bool_(True), np.array([1, 2]), np.str_("1")):
        refused(field, value, f"^{field} is .*: it must be an integer from ")
    if field in ("top_k", "n", "min_tokens"):
        refused(field, None, f"{field} is None: it must be an integer")
    else:
        assert getattr(SamplingParams(**{field: None}), field) is None


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"stop": "END"}, ("END",)),
        ({"stop": ["a", "b"]}, ("a", "b")),
        ({"stop": None}, ()),
        ({"stop_token_ids": np.array([4, 4, 2])}, (4, 2)),
        ({"stop_token_ids": None}, ()),
        ({"allowed_token_ids": [1, np.int64(2), 1]}, (1, 2)),
        ({"allowed_token_ids": None}, None),
        ({"logit_bias": {5: 1.5, np.int32(3): np.float16(-100)}}, ((3, -100.0), (5, 1.5))),
        ({"logit_bias": None}, ()),
    ],
)
def test_collections_are_kept_as_tuples_of_plain_values(fields: dict[str, Any], kept: Any) -> None:
    [field] = fields
    params = SamplingParams(**fields)
    assert getattr(params, field) == kept
    plain = [*(params.stop_token_ids), *(params.allowed_token_ids or ()), *dict(params.logit_bias)]
    assert all(type(token) is int for token in plain)
    assert all(type(bias) is float for bias in dict(params.logit_bias).values())
    assert pickle.loads(pickle.dumps(params)) == params == dataclasses.replace(params)
    assert len({params, dataclasses.replace(params)}) == 1


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("stop", ([""], "", ["a", ""], [5], [None], b"ab"), "stop holds"),
        ("stop", (0, 5, 1.5, False, True), "stop must be a list, not"),
        (
            "stop",
            ("x" * (MAX_STOP_CHARS + 1), ["x", "y" * MAX_STOP_CHARS]),
            f"{MAX_STOP_CHARS + 1} characters: at most {MAX_STOP_CHARS}",
        ),
        ("stop_token_ids", ([5, -1], ["1"], [1.0], [None], [True], 0, 7, 1.5, False), ""),
        ("allowed_token_ids", ([-1], [2**31], ["1"], [1.5], [True], 7, "12", [None]), ""),
        ("allowed_token_ids", ([],), "is empty: None allows all tokens"),
        ("logit_bias", ({5: 100.5},), "bias of token 5 is 100.5"),
        ("logit_bias", ({5: -100.5},), "bias of token 5 is -100.5"),
        ("logit_bias", ({5: math.nan},), "bias of token 5 is nan"),
        ("logit_bias", ({5: "1"},), "bias of token 5 is '1': it must be a number from -100 to 100"),
        ("logit_bias", ({"5": 1}, {1.0: 1}), "token id must be an integer"),
        ("logit_bias", ({-1: 1},), "token id is -1"),
        ("logit_bias", ({2**31: 1},), "token id is 2147483648"),
        ("logit_bias", ([(1, 1), (1, 2)],), "token id 1 twice"),
        ("logit_bias", ([1, 2],), "holds 1: it must be"),
        ("logit_bias", (5,), "must be a list, not 5"),
        *((field, (np.array(1), 10**5000), "must be a list") for field in ("stop", "stop_token_ids", "logit_bias")),
        ("logit_bias", (dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0),), f"at most {MAX_LOGIT_BIAS}"),
    ],
)
def test_collections_of_other_things_are_refused(field: str, values: tuple[Any, ...], message: str) -> None:
    for value in values:
        refused(field, value, message)


def test_what_does_not_go_together_is_an_error() -> None:
    with pytest.raises(InvalidSamplingParams, match="min_tokens is 5, but max_tokens is 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(InvalidSamplingParams, match="best_of is 4: it must be at least n, which is 5"):
        SamplingParams(n=5, best_of=4)


def test_params_are_values() -> None:
    stop = ["a"]
    params = SamplingParams(temperature=0.5, stop=stop, logit_bias={1: 2, 3: 4})
    stop.append("b")
    same = SamplingParams(temperature=0.5, stop="a", logit_bias={3: 4, 1: 2})
    assert params == same
    assert len({params, same}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    for kind in (ValueError, NanoEngineError):
        with pytest.raises(kind, match="top_p"):
            dataclasses.replace(params, top_p=2.0)
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)


@pytest.mark.parametrize(
    ("logprobs", "n", "best_of", "num_logprobs", "num_sequences"),
    [(None, 3, None, None, 3), (None, 2, 5, 0, 5), (3, 1, None, 3, 1), (3, 2, 2, 3, 2), (0, 1, None, 0, 1)],
)
def test_best_of_makes_more_completions_and_needs_the_log_probability_of_what_was_chosen(
    logprobs: int | None, n: int, best_of: int | None, num_logprobs: int | None, num_sequences: int
) -> None:
    params = SamplingParams(logprobs=logprobs, n=n, best_of=best_of)
    assert (params.num_logprobs, params.num_sequences) == (num_logprobs, num_sequences)
