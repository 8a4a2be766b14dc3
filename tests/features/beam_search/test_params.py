"""BeamSearchParams: what is accepted, and what is refused by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from nanoengine.core.errors import InvalidSamplingParams, NanoEngineError
from nanoengine.features.beam_search.params import BeamSearchParams


def test_params_of_a_search_are_values_of_which_only_the_width_must_be_given() -> None:
    params = BeamSearchParams(beam_width=2)
    assert (params.max_tokens, params.length_penalty, params.ignore_eos) == (64, 1.0, False)
    assert params == BeamSearchParams(beam_width=2, max_tokens=64)
    assert len({params, BeamSearchParams(beam_width=2)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.beam_width = 3  # type: ignore[misc]
    for options in ({}, {"beam_width": 2, "width": 2}):
        with pytest.raises(TypeError, match="width"):
            BeamSearchParams(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "allowed", "refused"),
    [
        ("beam_width", (1, 2**31 - 1), (0, -1, 1.0, "2", None, True, math.nan)),
        ("max_tokens", (1, 2**31 - 1), (0, -1, 1.0, "2", None, True, math.nan)),
        ("length_penalty", (0, 1, -10.0, 10.0), (math.nan, math.inf, -math.inf, 10.5, -10.5, "1", None, True)),
        ("ignore_eos", (True, False), ("no", 1, None)),
    ],
)
def test_values_are_within_their_limits(field: str, allowed: tuple[Any, ...], refused: tuple[Any, ...]) -> None:
    for value in allowed:
        assert getattr(BeamSearchParams(**({"beam_width": 2} | {field: value})), field) == value
    for value in refused:
        for kind in (InvalidSamplingParams, ValueError, NanoEngineError):
            with pytest.raises(kind, match=field):
                dataclasses.replace(BeamSearchParams(beam_width=2), **{field: value})


@pytest.mark.parametrize(("width", "eos", "count"), [(51, (), 102), (51, (0,), 102), (26, (0, 1, 2), 104)])
def test_more_candidates_than_the_engine_reports_are_refused(width: int, eos: tuple[int, ...], count: int) -> None:
    with pytest.raises(InvalidSamplingParams, match=f"beam_width is {width}.*{count} candidates.*100"):
        BeamSearchParams(beam_width=width).num_candidates(eos)
    assert BeamSearchParams(beam_width=25).num_candidates((0, 1, 2)) == 100
