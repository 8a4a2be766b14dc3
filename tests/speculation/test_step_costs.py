from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.speculation.step_costs import LEARNING_RATE, MOST_OFF, StepCosts
from tests.speculation.scripted import FAST

MEASURED = [(1, 2.0), (4, 3.0), (16, 9.0), (64, 33.0)]
curves = st.dictionaries(st.integers(1, 99), st.floats(1e-4, 10), min_size=1, max_size=7).map(
    lambda own: [*own.items()]
)
steps = st.lists(st.tuples(st.integers(1, 120), st.floats(0, 100)), max_size=20)


@pytest.mark.parametrize(
    ("measured", "seconds"),
    [
        (MEASURED[::-1], {1: 2, 2: 2 + 1 / 3, 4: 3, 10: 6, 16: 9, 40: 21, 64: 33}),  # between sizes in proportion
        (MEASURED, {128: 66}),  # beyond the largest, each token costs as much
        ([(8, 2.0)], {1: 2, 8: 2, 12: 3}),
        ([], {1: 1, 17: 1, 64: 1, 128: 2}),
        # None costs more than its tokens one by one, whatever else the machine did while it was measured.
        ([(1, 1.0), (2, 200.0), (8, 1.5), (16, 900.0)], {1: 1, 2: 2, 8: 2, 16: 3}),
    ],
)
def test_what_a_step_costs_follows_from_sizes_that_were_measured(
    measured: list[tuple[int, float]], seconds: dict[int, float]
) -> None:
    costs = StepCosts(measured)
    assert {size: costs.seconds(size) for size in seconds} == pytest.approx(seconds)


def test_sizes_that_are_never_tried_become_worth_a_try() -> None:
    costs = StepCosts([(1, 1.0), (16, 16.0)])
    for _ in range(100):
        costs.record(1, 1.0)
    assert costs.seconds(16) < 1.2
    for _ in range(100):
        costs.record(16, 9.0)
    for _ in range(20):
        costs.record(1, 1.0)
    assert costs.seconds(16) > 8, "once it is known, that lasts longer"


@FAST
@given(curve=curves, steps=steps)
def test_more_tokens_never_cost_less(curve: list[tuple[int, float]], steps: list[tuple[int, float]]) -> None:
    """Whatever was measured, and whatever came since."""
    costs = StepCosts(curve)
    for num_tokens, seconds in steps:
        costs.record(num_tokens, seconds)
    found = [costs.seconds(size) for size in range(1, 130)]
    assert all(seconds > 0 for seconds in found)
    assert all(more >= less * (1 - 1e-9) for less, more in pairwise(found))
    assert costs.curve == tuple((size, costs.seconds(size)) for size in sorted(dict(curve)))


@FAST
@given(size=st.sampled_from([1, 2, 3, 10, 16, 50, 64]), factor=st.floats(0.6, 1.9))
def test_steps_that_take_another_time_are_learned(size: int, factor: float) -> None:
    costs = StepCosts(MEASURED)
    true = factor * costs.seconds(size)
    for _ in range(100):
        before = abs(costs.seconds(size) - true)
        costs.record(size, true)
        assert abs(costs.seconds(size) - true) <= before + 1e-9
    if size in (16, 50, 64) or factor > 1:  # a step of fewer tokens was not seen, and takes no longer
        assert costs.seconds(size) == pytest.approx(true, rel=0.15)


def test_a_size_that_was_measured_in_a_bad_moment_is_not_believed_for_ever() -> None:
    """Where steps of more tokens take less, those of fewer do not take more."""
    costs = StepCosts([(1, 10.0), (8, 5.0)])
    for _ in range(60):
        costs.record(8, 5.0)
    assert costs.seconds(8) == pytest.approx(5, rel=0.05)
    for _ in range(60):
        costs.record(1, 4.0)
    for _ in range(60):
        costs.record(8, 6.0)
    assert [costs.seconds(size) for size in (1, 8)] == pytest.approx([4, 6], rel=0.05)


@pytest.mark.parametrize(("seconds", "factor"), [(1e9, MOST_OFF), (0.0, 1 / MOST_OFF)])
def test_one_step_moves_what_is_known_only_so_far(seconds: float, factor: float) -> None:
    costs = StepCosts([(8, 2.0)])
    costs.record(8, seconds)
    assert costs.seconds(8) == pytest.approx(2 * (1 + LEARNING_RATE * (factor - 1)))


def test_steps_larger_than_any_that_was_measured_teach_nothing() -> None:
    costs = StepCosts(MEASURED)
    costs.record(65, 1e-3)
    assert costs.curve == tuple(MEASURED)
