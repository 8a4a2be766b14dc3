"""What steps take is learned from those that were measured."""

from __future__ import annotations

import random

import pytest

from nanoengine.fairness.step_cost import FIRST_RATES, StepCost, Work


@pytest.mark.parametrize("seed", range(5))
def test_rates_come_near_those_of_the_machine(seed: int) -> None:
    """Whatever the machine is like, and though single steps are off by a third."""
    rng = random.Random(seed)
    true = Work(*(rate * rng.choice([0.2, 1, 5]) * 0.003 for rate in FIRST_RATES))
    cost = StepCost()

    def drawn() -> Work:
        rows, tokens = rng.choice([(1, 0), (60, 0), (1, 200), (0, 512), (30, 30)])
        return Work(1, rows, tokens, tokens * rng.randint(0, 3000), rng.choice([0, 0, 21 * (rows + tokens)]))

    def taken(work: Work) -> float:
        return sum(rate * amount for rate, amount in zip(true, work, strict=True))

    for _ in range(1500):
        work = drawn()
        cost.learn(work, taken(work) * rng.uniform(0.7, 1.4))
    for _ in range(50):
        work = drawn()
        assert 0.5 < cost.of(work) / taken(work) < 2


def test_one_step_that_was_disturbed_moves_little() -> None:
    cost = StepCost()
    work = Work(1, 8, 0, 0, 0)
    cost.learn(work, 0.01)
    cost.learn(work, 30.0)
    assert 0.01 < cost.of(work) < 0.011
