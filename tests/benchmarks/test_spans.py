from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.spans import merge

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])))


@given(spans)
def test_merged_spans_cover_the_same_points_and_lie_apart(drawn: list[tuple[int, int]]) -> None:
    merged = merge(drawn)
    points = {point for start, end in drawn for point in range(start, end)}
    assert {point for start, end in merged for point in range(int(start), int(end))} == points
    assert all(before[1] < after[0] for before, after in pairwise(merged))
