"""A model on a device that finishes late: what is launched is computed when its results are waited for."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable

from nanoengine.engine.messages import StepPlan, StepResult
from tests.engine.toys import ToyModel


class LateStep:
    def __init__(self, model: LateModel, plan: bytes):
        self.model = model
        self.plan = plan
        self.work: Callable[[StepPlan], StepResult] = model.execute
        self.outcome: StepResult | Exception | None = None

    def compute(self) -> None:
        try:
            self.outcome = self.work(pickle.loads(self.plan))
        except Exception as error:  # it belongs to whoever waits for this step
            self.outcome = error

    def result(self) -> StepResult:
        while self.outcome is None:
            self.model.queue.popleft().compute()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class LateModel(ToyModel):
    """A ToyModel that is always behind, and has only the bytes of the plans, as an executor in another process would."""

    def __init__(self, *args: object, **options: object):
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.queue: deque[LateStep] = deque()
        self.num_overlapping = 0  # steps that were launched while another one was not over

    def launch(self, plan: StepPlan) -> LateStep:  # type: ignore[override]
        step = LateStep(self, pickle.dumps(plan))
        self.num_overlapping += bool(self.queue)
        self.queue.append(step)
        return step
