"""Faults at every point of a step that computes a victim, and whom each touches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from nanoengine import LLM
from nanoengine.engine.messages import StepPlan
from nanoengine.engine.sequence import Sequence
from nanoengine.runner import model_runner as runner_module
from nanoengine.runner.model_runner import ModelRunner
from tests.e2e.small_engine import POISON, Broken
from tests.support import model_runner


@dataclass(frozen=True)
class Point:
    """A place in a step where something may go wrong.

    Attributes:
        find: the object and the attribute that is called there.
        is_late: whether the fault comes after what is called there is done.
        samples: whether only steps that sample get there.
        starts: whether only steps that start a row get there.
        error: what is raised.
    """

    find: Callable[[ModelRunner], tuple[Any, str]]
    is_late: bool = False
    samples: bool = False
    starts: bool = False
    error: type[Exception] = Broken


POINTS = {
    "before anything": Point(lambda runner: (runner.mover, "begin")),
    "rows": Point(lambda runner: (runner.rows, "apply")),
    "sampling params": Point(lambda runner: (runner.sampler, "start"), starts=True),
    "packing": Point(lambda _: (runner_module, "pack")),
    "first layer": Point(lambda runner: (runner.model.layers[0], "self_attn"), is_late=True),
    "last layer": Point(lambda runner: (runner.model.layers[-1], "self_attn"), is_late=True),
    "no memory for a layer": Point(
        lambda runner: (runner.model.layers[-1], "mlp"), is_late=True, error=torch.OutOfMemoryError
    ),
    "no memory to sample": Point(lambda runner: (runner.sampler, "sample"), samples=True, error=torch.OutOfMemoryError),
    "results": Point(lambda _: (runner_module.Step, "result"), samples=True),
    "NaN": Point(lambda runner: (runner.model, "compute_logits"), is_late=True, samples=True),
}


@dataclass(eq=False)
class Launch:
    """A plan, and whose runs and samples are in it."""

    plan: StepPlan
    seqs: dict[int, Sequence]  # by row
    victims: set[int]  # rows of the victim that are computed
    samplers: set[int]  # rows of the victim that sample
    starts: bool  # whether any of its rows begins
    decodes: bool


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
        self._launched: deque[Launch] = deque()  # those whose execution has not begun
        self._now: Launch | None = None
        self._plan: StepPlan | None = None  # what of it is executed
        self._rows: set[int] = set()  # of the victim
        self._launches: dict[int, Launch] = {}

    def lie_in_wait(self, patch: pytest.MonkeyPatch) -> None:
        runner = model_runner(self.llm)
        launch, begin = runner.launch, runner.mover.begin

        def launching(plan: StepPlan) -> Any:
            self._note(plan)
            return launch(plan)

        def beginning(plan: StepPlan) -> None:
            self._now, self._plan = self._launched.popleft(), plan
            begin(plan)

        patch.setattr(runner, "launch", launching)
        patch.setattr(runner.mover, "begin", beginning)
        owner, name = self.point.find(runner)
        original = getattr(owner, name)

        def sabotaged(*args: Any, **kwargs: Any) -> Any:
            if name == "begin":
                self._now, self._plan = self._launched.popleft(), args[0]
            launched = self._launches[id(args[0].plan)] if name == "result" else self._now
            strikes = self._strikes(launched)
            if strikes and not self.point.is_late:
                self._strike(launched)
            result = (begin if name == "begin" else original)(*args, **kwargs)
            if strikes and self.is_nan:
                self._spoil(result)
            elif strikes and self.point.is_late:
                self._strike(launched)
            return result

        patch.setattr(owner, name, sabotaged)

    def _note(self, plan: StepPlan) -> None:
        for start in plan.started:
            self._rows.discard(start.row)
            if POISON in start.token_ids:
                self._rows.add(start.row)
        samplers = [*plan.decodes.rows.tolist(), *(row for chunk in plan.chunks for row in chunk.samples)]
        rows = {*samplers, *(chunk.row for chunk in plan.chunks)}
        launch = Launch(
            plan,
            {seq.row: seq for seq in self.llm.engine.scheduler.running if seq.row in rows},
            self._rows & rows,
            self._rows & set(samplers),
            any(start.row in self._rows for start in plan.started),
            bool(self._rows & set(plan.decodes.rows.tolist())),
        )
        self._launched.append(launch)
        self._launches[id(plan)] = launch

    def _strikes(self, launch: Launch | None) -> bool:
        if self.has_struck or launch is None or not launch.victims or launch.decodes != self.in_decode:
            return False
        return (bool(launch.samplers) or not self.point.samples) and (launch.starts or not self.point.starts)

    def _strike(self, launch: Launch | None) -> None:
        self._hit(launch)
        raise self.point.error("sabotaged")

    def _spoil(self, logits: Any) -> None:
        """NaN for the victim's first row that samples."""
        assert self._now is not None
        assert self._plan is not None
        plan = self._plan
        order = [*plan.decodes.rows.tolist(), *(row for chunk in plan.chunks for row in chunk.samples)]
        row = next(row for row in order if row in self._now.samplers)
        logits[order.index(row)] = torch.nan
        self._hit(self._now)
        self.touched = {self._now.seqs[row]}

    def _hit(self, launch: Launch | None) -> None:
        assert launch is not None
        self.has_struck = True
        self.touched = set(launch.seqs.values())
        chunks = [chunk.num_computed for chunk in launch.plan.chunks if chunk.row in launch.victims]
        self.num_sound = min(chunks, default=10**9)
