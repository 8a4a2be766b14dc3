"""Faults at every point of a step that computes a victim, and whom each touches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from nanoengine import LLM
from nanoengine.core import model_runner as runner_module
from nanoengine.core.messages import StepPlan
from nanoengine.core.model_runner import LaunchedStep, ModelRunner
from nanoengine.core.scheduler import Step
from nanoengine.core.sequence import Sequence
from nanoengine.recording import recorded_steps
from tests.e2e.small_engine import POISON, Broken
from tests.support import model_runner

Place = tuple[Any, str]
"""An object, and the name of what is called there."""


@dataclass(frozen=True)
class Point:
    """A place in a step where something may go wrong.

    Attributes:
        find: where that is; what is called there is called by one of these.
        is_late: whether the fault comes after what is called there is done.
        samples: whether only steps that sample get there.
        starts: whether only steps that start a row can go wrong there.
        error: what is raised.
    """

    find: Callable[[ModelRunner], list[Place]]
    is_late: bool = False
    samples: bool = False
    starts: bool = False
    error: type[Exception] = Broken


POINTS = {
    "before anything": Point(lambda runner: [(runner.rows, "apply")]),
    "rows": Point(lambda runner: [(runner.rows, "apply")], is_late=True),
    "sampling params": Point(lambda runner: [(runner.sampler, "apply")], starts=True),
    "parts of capabilities": Point(lambda runner: [(runner.parts[-1], "begin")]),
    "packing": Point(lambda _: [(runner_module, "pack"), (recorded_steps, "pack")]),
    "first layer": Point(lambda runner: [(runner.model.layers[0], "self_attn")], is_late=True),
    "last layer": Point(lambda runner: [(runner.model.layers[-1], "self_attn")], is_late=True),
    "no memory for a layer": Point(
        lambda runner: [(runner.model.layers[-1], "mlp")], is_late=True, error=torch.OutOfMemoryError
    ),
    "no memory to sample": Point(
        lambda runner: [(runner.sampler, "sample")], samples=True, error=torch.OutOfMemoryError
    ),
    "results": Point(lambda _: [(LaunchedStep, "result")], samples=True),
    "NaN": Point(lambda runner: [(runner.model, "compute_logits")], is_late=True, samples=True),
}


def is_victim(seq: Sequence) -> bool:
    return POISON in seq.request.prompt_token_ids


def sampling(step: Step) -> list[Sequence]:
    """Whose the samples of a step are, in their order."""
    return [*step.decodes, *(seq for seq, run in zip(step.runs, step.plan.runs, strict=True) if run.samples)]


@dataclass(eq=False)
class Saboteur:
    """Makes one step fail: one that decodes the victim, or one that computes its prompt. The victim's prompt has POISON in it.

    Attributes:
        touched: the sequences of the step that failed.
        num_sound: tokens of the victim whose K/V were computed by steps before.
    """

    llm: LLM
    point: Point
    in_decode: bool
    is_nan: bool = False
    touched: set[Sequence] = field(default_factory=set)
    num_sound: int = 0
    has_struck: bool = False

    def __post_init__(self) -> None:
        self._now: Step | None = None  # what is executed
        self._steps: dict[int, Step] = {}  # of plans that were launched
        self._launched: dict[LaunchedStep, Step] = {}

    def lie_in_wait(self, patch: pytest.MonkeyPatch) -> None:
        runner = model_runner(self.llm)
        launch, execute = runner.launch, runner._execute

        def launching(plan: StepPlan) -> LaunchedStep:
            step = self._steps[id(plan)] = self.llm.engine.scheduler.in_flight[-1]
            assert step.plan is plan
            launched = launch(plan)
            self._launched[launched] = step
            return launched

        def executing(launched: LaunchedStep, plan: StepPlan) -> None:
            self._now = self._steps[id(plan)]
            execute(launched, plan)

        patch.setattr(runner, "launch", launching)
        patch.setattr(runner, "_execute", executing)
        for owner, name in self.point.find(runner):
            patch.setattr(owner, name, self._sabotaged(getattr(owner, name)))

    def _sabotaged(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sabotaged(*args: Any, **kwargs: Any) -> Any:
            step = self._launched[args[0]] if isinstance(args[0], LaunchedStep) else self._now
            assert step is not None
            strikes = self._strikes(step)
            if strikes and not self.point.is_late:
                self._strike(step)
            result = original(*args, **kwargs)
            if strikes and self.is_nan:
                self._spoil(step, result)
            elif strikes and self.point.is_late:
                self._strike(step)
            return result

        return sabotaged

    def _strikes(self, step: Step) -> bool:
        victims = [seq for seq in (*step.decodes, *step.runs) if is_victim(seq)]
        if self.has_struck or not victims or any(map(is_victim, step.decodes)) != self.in_decode:
            return False
        samples, starts = any(map(is_victim, sampling(step))), any(map(is_victim, step.started))
        return (samples or not self.point.samples) and (starts or not self.point.starts)

    def _strike(self, step: Step) -> None:
        self._hit(step)
        raise self.point.error("sabotaged")

    def _spoil(self, step: Step, logits: torch.Tensor) -> None:
        """NaN for the first of the victim's rows that samples."""
        place, seq = next((i, seq) for i, seq in enumerate(sampling(step)) if is_victim(seq))
        logits[place] = torch.nan
        self._hit(step)
        self.touched = {seq}

    def _hit(self, step: Step) -> None:
        self.has_struck = True
        self.touched = {*step.decodes, *step.runs}
        pairs = zip(step.runs, step.plan.runs, strict=True)
        self.num_sound = min((run.start for seq, run in pairs if is_victim(seq)), default=10**9)
