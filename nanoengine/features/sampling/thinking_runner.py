"""The runner's part of thinking: rows get other parameters at the end of a thought."""

from __future__ import annotations

from nanoengine.core.messages import StepPlan
from nanoengine.core.model_runner import ModelRunner, RunnerPart
from nanoengine.features.sampling.thinking import ENDS_OF_THOUGHTS


class ThinkingRunnerPart(RunnerPart):
    """Carries out the orders of `ThinkingPart`."""

    def __init__(self, runner: ModelRunner):
        self.sampler = runner.sampler
        runner.parts.append(self)

    def begin(self, plan: StepPlan) -> None:
        if orders := plan.extras.get(ENDS_OF_THOUGHTS):
            self.sampler.apply(StepPlan(started=orders))
