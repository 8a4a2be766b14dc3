"""BeamSearchParams: what is accepted, and what is refused by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from nanoengine.beam_search.params import BeamSearchParams
from nanoengine.core.errors import InvalidSamplingParams, NanoEngineError


def test_only_the_width_must_be_given() -> None:
    params = BeamSearchParams(beam_width=3)
    assert params.max_tokens >= 1
    assert params.length_penalty == 1.0
    assert params.early_stopping is False
    assert params.ignore_eos is False
    with pytest.raises(TypeError, match="beam_width"):
        BeamSearchParams()  # type: ignore[call-arg]


@pytest.mark.parametrize("field", ["beam_width", "max_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "2", None, True, math.nan])
def test_counts_are_positive_integers(field: str, value: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match=field):
        BeamSearchParams(**({"beam_width": 2} | {field: value}))


@pytest.mark.parametrize("value", [0, 1, -1, 0.0, 2.5, -0.5])
def test_length_penalties_may_favour_either_side(value: float) -> None:
    assert BeamSearchParams(beam_width=2, length_penalty=value).length_penalty == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1000.0, -1000, "1", None, True])
def test_length_penalties_that_are_no_sane_number_are_refused(value: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match="length_penalty"):
        BeamSearchParams(beam_width=2, length_penalty=value)


@pytest.mark.parametrize("value", [True, False, "never"])
def test_the_ways_to_stop(value: bool | str) -> None:
    assert BeamSearchParams(beam_width=2, early_stopping=value).early_stopping == value


@pytest.mark.parametrize("value", ["always", "", None, 2, "True", 1, 0, 1.0])
def test_other_ways_to_stop_are_refused(value: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match="early_stopping"):
        BeamSearchParams(beam_width=2, early_stopping=value)


@pytest.mark.parametrize("value", ["no", 1, None])
def test_ignore_eos_of_beams_is_true_or_false(value: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match="ignore_eos"):
        BeamSearchParams(beam_width=2, ignore_eos=value)


def test_an_unknown_field_of_beams_is_an_error() -> None:
    with pytest.raises(TypeError, match="width"):
        BeamSearchParams(beam_width=2, width=2)  # type: ignore[call-arg]


def test_beam_search_params_are_values() -> None:
    params = BeamSearchParams(beam_width=2)
    assert params == BeamSearchParams(beam_width=2, max_tokens=params.max_tokens)
    assert len({params, BeamSearchParams(beam_width=2)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.beam_width = 3  # type: ignore[misc]
    with pytest.raises(InvalidSamplingParams, match="beam_width"):
        dataclasses.replace(params, beam_width=0)


@pytest.mark.parametrize("kind", [ValueError, NanoEngineError])
def test_the_error_of_beams_can_be_caught_as(kind: type[Exception]) -> None:
    with pytest.raises(kind):
        BeamSearchParams(beam_width=0)


@pytest.mark.parametrize(("width", "eos", "count"), [(51, (), 102), (51, (0,), 102), (26, (0, 1, 2), 104)])
def test_more_candidates_than_the_engine_reports_are_refused(width: int, eos: tuple[int, ...], count: int) -> None:
    with pytest.raises(InvalidSamplingParams, match=f"beam_width is {width}.*{count} candidates.*100"):
        BeamSearchParams(beam_width=width).num_candidates(eos)
    assert BeamSearchParams(beam_width=25).num_candidates((0, 1, 2)) == 100
