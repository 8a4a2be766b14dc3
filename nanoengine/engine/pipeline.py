"""Pipeline: the steps in flight. Plans go in at one end; their results come out at the other, in the same order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from nanoengine.engine.executor import Executor, Launched
from nanoengine.engine.interrupts import InterruptGuard
from nanoengine.engine.messages import StepPlan, StepResult


class Broken:
    """A plan whose launch failed."""

    def __init__(self, error: Exception):
        self.error = error

    def result(self) -> StepResult:
        raise self.error


class Outcome(NamedTuple):
    """What became of a plan."""

    plan: StepPlan
    result: StepResult | Exception
    end: float  # when the result came
    seconds: float  # since its launch, or since the result before it came, whichever was later


class Pipeline:
    """Plans that were launched and whose results were not taken yet. Only what the executor does may be interrupted.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self._steps: deque[tuple[StepPlan, Launched, float]] = deque()  # the oldest first, with their starts
        self._last_end = float("-inf")

    def __len__(self) -> int:
        return len(self._steps)

    def launch(self, executor: Executor, plan: StepPlan, guard: InterruptGuard) -> None:
        """Begin a plan. What goes wrong in it, comes out when its turn has come."""
        start = self.clock()
        launched: Launched
        try:
            with guard.allowed():
                launched = executor.launch(plan)
        except Exception as error:
            launched = Broken(error)
        self._steps.append((plan, launched, start))

    def take(self, guard: InterruptGuard) -> Outcome:
        """Wait for the oldest plan, and take it out."""
        plan, launched, start = self._steps[0]
        result: StepResult | Exception
        try:
            with guard.allowed():
                result = launched.result()
        except Exception as error:
            result = error
        self._steps.popleft()
        end = self.clock()
        seconds = end - max(start, self._last_end)
        self._last_end = end
        return Outcome(plan, result, end, seconds)

    def clear(self) -> None:
        """Forget what is in flight."""
        self._steps.clear()
