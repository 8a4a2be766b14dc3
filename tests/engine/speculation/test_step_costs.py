from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.engine.speculation.step_costs import LEARNING_RATE, MOST_OFF, StepCosts
from tests.engine.toys import FAST

MEASURED = [(1, 2.0), (4, 3.0), (16, 9.0), (64, 33.0)]
curves = st.dictionaries(st.integers(1, 99), st.floats(1e-4, 10), min_size=1, max_size=7).map(
    lambda own: [*own.items()]
)
steps = st.lists(st.tuples(st.integers(1, 120), st.floats(0, 100)), max_size=20)


def test_between_measured_sizes_it_goes_in_proportion() -> None:
    costs = StepCosts(reversed(MEASURED))
    assert [costs.seconds(size) for size in (1, 4, 16, 64)] == [2, 3, 9, 33]
    assert costs.seconds(2) == pytest.approx(2 + 1 / 3)
    assert costs.seconds(10) == pytest.approx(6)
    assert costs.seconds(40) == pytest.approx(21)


def test_beyond_the_largest_size_each_token_costs_as_much() -> None:
    assert StepCosts(MEASURED).seconds(128) == 66
    assert StepCosts([(8, 2.0)]).seconds(12) == 3


def test_below_the_smallest_size_it_is_that_of_the_smallest() -> None:
    assert StepCosts([(8, 2.0), (16, 3.0)]).seconds(1) == 2


def test_where_nothing_was_measured_a_few_tokens_cost_as_much_as_one() -> None:
    costs = StepCosts()
    assert costs.seconds(1) == costs.seconds(17) == costs.seconds(64)
    assert costs.seconds(65) > costs.seconds(64)


def test_no_step_is_taken_to_cost_more_than_its_tokens_one_by_one() -> None:
    """Whatever else the machine did while it was measured."""
    assert StepCosts([(1, 1.0), (2, 200.0), (8, 1.5), (16, 900.0)]).curve == ((1, 1.0), (2, 2.0), (8, 2.0), (16, 3.0))


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
