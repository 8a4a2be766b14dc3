"""Pipeline: the steps in flight. Batches go in at one end; their results come out at the other, in the same order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from nanoengine.engine.interrupts import InterruptGuard
from nanoengine.engine.messages import SampledBatch, ScheduledBatch


class Launched(Protocol):
    """A batch that was launched."""

    def result(self) -> SampledBatch:
        """Wait for its end; raises what went wrong in it."""
        ...


class Executor(Protocol):
    """What the engine needs of a model: run batches, one after the other, and sample their tokens."""

    def launch(self, batch: ScheduledBatch) -> Launched:
        """Begin a batch, to be executed after those launched before; it may be over when this returns."""
        ...

    def close(self) -> None: ...


class Broken:
    """A batch whose launch failed."""

    def __init__(self, error: Exception):
        self.error = error

    def result(self) -> SampledBatch:
        raise self.error


class Outcome(NamedTuple):
    """What became of a batch."""

    batch: ScheduledBatch
    result: SampledBatch | Exception
    end: float  # when the result came
    seconds: float  # since its launch, or since the result before it came, whichever was later


class Pipeline:
    """Batches that were launched and whose results were not taken yet. Only what the executor does may be interrupted.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self._steps: deque[tuple[ScheduledBatch, Launched, float]] = deque()  # the oldest first, with their starts
        self._last_end = float("-inf")

    def __len__(self) -> int:
        return len(self._steps)

    def launch(self, executor: Executor, batch: ScheduledBatch, guard: InterruptGuard) -> None:
        """Begin a batch. What goes wrong in it, comes out when its turn has come."""
        start = self.clock()
        launched: Launched
        try:
            with guard.allowed():
                launched = executor.launch(batch)
        except Exception as error:
            launched = Broken(error)
        self._steps.append((batch, launched, start))

    def take(self, guard: InterruptGuard) -> Outcome:
        """Wait for the oldest batch, and take it out."""
        batch, launched, start = self._steps[0]
        result: SampledBatch | Exception
        try:
            with guard.allowed():
                result = launched.result()
        except Exception as error:
            result = error
        self._steps.popleft()
        end = self.clock()
        seconds = end - max(start, self._last_end)
        self._last_end = end
        return Outcome(batch, result, end, seconds)

    def clear(self) -> None:
        """Forget what is in flight."""
        self._steps.clear()
