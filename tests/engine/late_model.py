"""A model on a device that finishes late: what is launched is computed when its results are waited for."""

from __future__ import annotations

from collections import deque
from copy import copy

from nanoengine.engine.messages import SampledBatch, ScheduledBatch
from tests.engine.toys import ToyModel


class LateStep:
    def __init__(self, model: LateModel, batch: ScheduledBatch):
        self.model = model
        self.batch = batch
        self.outcome: SampledBatch | Exception | None = None

    def compute(self) -> None:
        try:
            self.outcome = self.model.execute(self.batch)
        except Exception as error:  # it belongs to whoever waits for this step
            self.outcome = error

    def result(self) -> SampledBatch:
        while self.outcome is None:
            self.model.queue.popleft().compute()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class LateModel(ToyModel):
    """A ToyModel that is always behind. What a step reads of the scheduler's lists, it copies when it is launched."""

    def __init__(self, *args: object, **options: object):
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.queue: deque[LateStep] = deque()
        self.num_overlapping = 0  # steps that were launched while another one was not over

    def launch(self, batch: ScheduledBatch) -> LateStep:  # type: ignore[override]
        packed = copy(batch)
        packed.block_tables = [list(table) for table in batch.block_tables]
        step = LateStep(self, packed)
        self.num_overlapping += bool(self.queue)
        self.queue.append(step)
        return step
