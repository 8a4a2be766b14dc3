"""What may go wrong in a step: at a point of it, while it computes a victim, and whom that touches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from nanoengine import LLM
from nanoengine.core import model_runner as runner_module
from nanoengine.core.messages import Launched, StepPlan
from nanoengine.core.model_runner import ModelRunner
from nanoengine.core.scheduler import Step
from nanoengine.core.sequence import Request, Sequence
from nanoengine.kernels.recording import recorded_steps
from tests.e2e.small_engine import Broken
from tests.support import model_runner

Place = tuple[Any, str]
"""An object, and the name of what is called there."""


@dataclass(frozen=True)
class Point:
    """A place in a step where something may go wrong.

    Attributes:
        find: where that is; what is called there is called by one of these.
        is_result: whether it is the wait for the results of a step, which nothing has.
        is_late: whether the fault comes after what is called there is done.
        error: what is raised; None: nothing, logits of the victim are NaN.
    """

    find: Callable[[ModelRunner], list[Place]] = lambda _: []
    is_late: bool = False
    is_result: bool = False
    error: type[BaseException] | None = Broken


POINTS = {
    "before anything": Point(lambda runner: [(runner.rows, "apply")]),
    "rows": Point(lambda runner: [(runner.rows, "apply")], is_late=True),
    "sampling params": Point(lambda runner: [(runner.sampler, "apply")]),
    "parts of capabilities": Point(lambda runner: [(part, "begin") for part in runner.parts]),
    "parts of capabilities, done": Point(lambda runner: [(part, "begin") for part in runner.parts], is_late=True),
    "packing": Point(lambda _: [(runner_module, "pack"), (recorded_steps, "pack")]),
    "first layer": Point(lambda runner: [(runner.model.layers[0], "self_attn")], is_late=True),
    "no memory for a layer": Point(
        lambda runner: [(runner.model.layers[-1], "mlp")], is_late=True, error=torch.OutOfMemoryError
    ),
    "no memory to sample": Point(lambda runner: [(runner.sampler, "sample")], error=torch.OutOfMemoryError),
    "results": Point(is_result=True),
    "NaN": Point(lambda runner: [(runner.sampler, "sample")], error=None),
}
CTRL_C = {
    "Ctrl-C before anything": Point(lambda runner: [(runner.rows, "apply")], error=KeyboardInterrupt),
    "Ctrl-C after copies": Point(
        lambda runner: [(part, "begin") for part in runner.parts], is_late=True, error=KeyboardInterrupt
    ),
    "Ctrl-C in a layer": Point(lambda runner: [(runner.model.layers[0], "self_attn")], error=KeyboardInterrupt),
    "Ctrl-C while results are awaited": Point(is_result=True, error=KeyboardInterrupt),
}
"""What ends nobody, wherever it comes."""


@dataclass(eq=False)
class Saboteur:
    """Makes a step fail that computes the victim.

    Args:
        nth: of the times that such a step comes to the point.

    Attributes:
        touched: the sequences that this ends.
    """

    llm: LLM
    point: Point
    victim: Request
    nth: int
    touched: set[Sequence] = field(default_factory=set)
    has_struck: bool = False

    def __post_init__(self) -> None:
        self._now: Step | None = None  # what is executed
        self._steps: dict[int, tuple[StepPlan, Step]] = {}  # by the id of a plan, which lives as long as this

    def lie_in_wait(self, patch: pytest.MonkeyPatch) -> None:
        runner = model_runner(self.llm)
        launch, execute = runner.launch, runner._execute

        def launching(plan: StepPlan) -> Launched:
            step = self.llm.engine.scheduler.in_flight[-1]
            self._steps[id(plan)] = plan, step
            launched = launch(plan)
            return partial(self._sabotaged(launched), step=step) if self.point.is_result else launched

        def executing(plan: StepPlan) -> Any:
            self._now = self._steps[id(plan)][1]
            return execute(plan)

        patch.setattr(runner, "launch", launching)
        patch.setattr(runner, "_execute", executing)
        for owner, name in self.point.find(runner):
            patch.setattr(owner, name, self._sabotaged(getattr(owner, name)))

    def _sabotaged(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sabotaged(*args: Any, step: Step | None = None, **kwargs: Any) -> Any:
            step = step or self._now
            assert step is not None
            strikes = self._strikes(step)
            if strikes and self.point.error is None:
                self._spoil(step, args[1])
            elif strikes and not self.point.is_late:
                self._strike(step)
            result = original(*args, **kwargs)
            if strikes and self.point.is_late:
                self._strike(step)
            return result

        return sabotaged

    def _strikes(self, step: Step) -> bool:
        seqs = samples(step) if self.point.error is None else [*step.decodes, *step.runs]
        if self.has_struck or all(seq.request is not self.victim for seq in seqs):
            return False
        self.nth -= 1
        return self.nth == 0

    def _strike(self, step: Step) -> None:
        self.has_struck = True
        assert self.point.error is not None
        if self.point.error is not KeyboardInterrupt:
            self.touched = {*step.decodes, *step.runs}
        raise self.point.error("sabotaged")

    def _spoil(self, step: Step, logits: torch.Tensor) -> None:
        """NaN for the first of the victim's rows."""
        self.has_struck = True
        place, seq = next((i, seq) for i, seq in enumerate(samples(step)) if seq.request is self.victim)
        logits[place] = torch.nan
        self.touched = {seq}


def samples(step: Step) -> list[Sequence]:
    """Whose each sample of a step is."""
    runs = zip(step.runs, step.plan.runs, strict=True)
    return [*step.decodes, *(seq for seq, run in runs for _ in range(run.num_new if run.drafts else run.samples))]
