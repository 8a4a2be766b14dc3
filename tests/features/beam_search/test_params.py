"""BeamSearchParams: bounds, and what is refused by name. Values of other types: tests/test_any_value.py."""

from __future__ import annotations

import math
from typing import Any

import pytest

from nanoengine.core.errors import InvalidSamplingParams
from nanoengine.features.beam_search.params import BeamSearchParams


def test_only_the_width_must_be_given() -> None:
    params = BeamSearchParams(beam_width=2)
    assert (params.max_tokens, params.length_penalty, params.ignore_eos) == (64, 1.0, False)
    with pytest.raises(TypeError, match="width"):
        BeamSearchParams()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("field", "allowed", "refused"),
    [
        ("beam_width", (1, 2**31 - 1), (0, -1)),
        ("max_tokens", (1, 2**31 - 1), (0, -1)),
        ("length_penalty", (0, -10.0, 10.0), (math.nan, math.inf, 10.5, -10.5)),
    ],
)
def test_values_are_within_their_limits(field: str, allowed: tuple[Any, ...], refused: tuple[Any, ...]) -> None:
    for value in allowed:
        assert getattr(BeamSearchParams(**({"beam_width": 2} | {field: value})), field) == value
    for value in refused:
        with pytest.raises(InvalidSamplingParams, match=field):
            BeamSearchParams(**({"beam_width": 2} | {field: value}))


@pytest.mark.parametrize(("width", "eos", "count"), [(51, (), 102), (51, (0,), 102), (26, (0, 1, 2), 104)])
def test_more_candidates_than_the_engine_reports_are_refused(width: int, eos: tuple[int, ...], count: int) -> None:
    with pytest.raises(InvalidSamplingParams, match=f"beam_width is {width}.*{count} candidates.*100"):
        BeamSearchParams(beam_width=width).num_candidates(eos)
    assert BeamSearchParams(beam_width=25).num_candidates((0, 1, 2)) == 100
