"""The steps in flight: results in the order of the launches, errors in their turn, interruptions at once, time counted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nanoengine.engine.interrupts import InterruptGuard
from nanoengine.engine.messages import StepPlan, StepResult
from nanoengine.engine.pipeline import Pipeline
from tests.engine.engine_toys import Clock


class Step:
    def __init__(self, act: Callable[[], StepResult]):
        self.result = act


class Acting:
    """An executor whose steps do what they are told when their results are asked for, and another thing when launched."""

    def __init__(self, act: Callable[[], Any], at_launch: Callable[[], Any] = lambda: None):
        self.act, self.at_launch = act, at_launch

    def launch(self, plan: StepPlan) -> Step:
        self.at_launch()
        return Step(self.act)

    def close(self) -> None:
        pass


def raising(error: BaseException) -> Callable[[], Any]:
    def act() -> None:
        raise error

    return act


def test_results_come_in_the_order_of_the_launches() -> None:
    pipeline, guard = Pipeline(Clock()), InterruptGuard()
    plans, results = [StepPlan(), StepPlan()], [StepResult([1]), StepResult([2])]
    for one, result in zip(plans, results, strict=True):
        pipeline.launch(Acting(lambda result=result: result), one, guard)  # type: ignore[misc]
    assert len(pipeline) == 2
    for one, result in zip(plans, results, strict=True):
        outcome = pipeline.take(guard)
        assert outcome.plan is one
        assert outcome.result is result
    assert not pipeline


def test_errors_wait_for_their_turn() -> None:
    pipeline, guard = Pipeline(Clock()), InterruptGuard()
    at_launch, late = ValueError("at launch"), ValueError("late")
    pipeline.launch(Acting(lambda: StepResult([1])), StepPlan(), guard)
    pipeline.launch(Acting(lambda: StepResult([2]), raising(at_launch)), StepPlan(), guard)
    pipeline.launch(Acting(raising(late)), StepPlan(), guard)
    assert [pipeline.take(guard).result for _ in range(3)] == [StepResult([1]), at_launch, late]


def test_an_interruption_does_not_wait_and_takes_nothing_out() -> None:
    pipeline, guard = Pipeline(Clock()), InterruptGuard()
    pipeline.launch(Acting(raising(KeyboardInterrupt())), StepPlan(), guard)
    with pytest.raises(KeyboardInterrupt):
        pipeline.take(guard)
    assert len(pipeline) == 1
    with pytest.raises(KeyboardInterrupt):
        pipeline.launch(Acting(lambda: StepResult([]), raising(KeyboardInterrupt())), StepPlan(), guard)
    assert len(pipeline) == 1
    pipeline.clear()
    assert not pipeline


def test_the_time_of_steps_that_overlap_is_counted_once() -> None:
    clock, guard = Clock(), InterruptGuard()
    pipeline = Pipeline(clock)
    executor = Acting(lambda: StepResult([]))
    pipeline.launch(executor, StepPlan(), guard)
    clock.now += 1
    pipeline.launch(executor, StepPlan(), guard)
    clock.now += 2
    first = pipeline.take(guard)
    clock.now += 4
    second = pipeline.take(guard)
    assert (first.seconds, second.seconds) == (3, 4)
    assert second.end == clock.now
    clock.now += 100  # nothing was in flight
    pipeline.launch(executor, StepPlan(), guard)
    clock.now += 5
    assert pipeline.take(guard).seconds == 5
