from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.features.observability.histogram import (
    Histogram,
    length_bounds,
)


@settings(max_examples=100)
@given(
    bounds=st.lists(st.integers(0, 20), min_size=1, unique=True).map(sorted),
    values=st.lists(st.one_of(st.integers(0, 25), st.floats(0, 25))),
)
def test_a_bucket_holds_values_up_to_its_bound(bounds: list[int], values: list[float]) -> None:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    assert histogram.cumulative() == [*(sum(value <= bound for value in values) for bound in bounds), len(values)]
    assert (histogram.count, histogram.sum) == (len(values), pytest.approx(sum(values)))


@pytest.mark.parametrize(
    ("longest", "bounds"),
    [
        (1, (1,)),
        (4, (1, 2)),
        (5, (1, 2, 5)),
        (64, (1, 2, 5, 10, 20, 50)),
        (2048, (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)),
    ],
)
def test_lengths_are_told_apart_up_to_the_longest(longest: int, bounds: tuple[int, ...]) -> None:
    assert length_bounds(longest) == bounds
