"""What steps take is learned from those that were measured."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from nanoengine.features.fairness.step_cost import FIRST_RATES, StepCost, Work


@pytest.mark.parametrize("seed", range(5))
def test_rates_and_curve_come_near_those_of_the_machine(seed: int) -> None:
    """Whatever the machine is like, and though single steps are off by a third: rows may be free up to some number, or dear from
    the second on.
    """
    rng = random.Random(seed)
    rates = [rate * rng.choice([0.2, 1, 5]) * 0.003 for rate in FIRST_RATES]
    jump, slope = rng.choice([(2, 0.003), (9, 0.001)]), rng.choice([1e-5, 2e-4])
    cost = StepCost()

    def drawn() -> Work:
        rows, tokens = rng.choice([(1, 0), (5, 0), (60, 0), (1, 200), (0, 512), (30, 30)])
        told = rng.choice([0, 0, 21 * (rows + tokens)]) if tokens else 0
        return Work(rows, tokens, tokens * rng.randint(0, 3000), told)

    def taken(work: Work) -> float:
        steps = 0.003 + slope * work.rows + (jump[1] if work.rows >= jump[0] else 0)
        if work.prompt_tokens:
            steps += 0.004 + slope * work.prompt_tokens
        return steps + sum(rate * amount for rate, amount in zip(rates, work[2:], strict=True))

    for _ in range(1500):
        work = drawn()
        cost.learn(work, taken(work) * rng.uniform(0.7, 1.4))
    for _ in range(50):
        work = drawn()
        assert 0.5 < cost.of(work) / taken(work) < 2
    assert all(cost.decodes.is_known(rows) for rows in (1, 5, 60))
    assert not cost.decodes.is_known(600)
    for curve in (cost.decodes, cost.prompts):
        assert all(fewer <= more for fewer, more in pairwise(curve.at(count) for count in range(200)))
        assert all(curve.at(2 * count) <= 2.0001 * curve.at(count) for count in range(1, 200))
        assert all(curve.most(curve.at(count)) >= count * 0.999 for count in range(200))


def test_one_step_that_was_disturbed_moves_little() -> None:
    cost = StepCost()
    work = Work(8)
    cost.learn(work, 0.01)
    cost.learn(work, 30.0)
    assert 0.01 < cost.of(work) < 0.012


def test_what_was_measured_often_stands_beside_one_step_that_was_disturbed() -> None:
    """Of the first steps at a place the fastest counts; and they move no place that is known."""
    cost = StepCost()
    for _ in range(5):
        cost.learn(Work(1), 0.002)
        cost.learn(Work(64), 0.020)
    cost.learn(Work(2), 0.4)
    assert cost.of_tokens(1) == pytest.approx(0.002)
    assert cost.of_tokens(2) <= 0.0041
    cost.learn(Work(256), 0.9)
    cost.learn(Work(256), 0.025)
    assert cost.of_tokens(256) == pytest.approx(0.025, rel=0.1)


def test_few_rows_are_learned_beside_many() -> None:
    """What one row takes is not a part of what many take."""
    cost = StepCost()
    cost.learn(Work(64), 0.040)
    cost.learn(Work(1), 0.002)
    for _ in range(20):
        cost.learn(Work(64), 0.040)
        cost.learn(Work(1), 0.002)
    assert cost.of_tokens(64) == pytest.approx(0.040)
    assert cost.of_tokens(1) == pytest.approx(0.002, rel=0.2)
