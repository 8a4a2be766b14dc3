"""The runner's part of thinking: forced tokens, and the change of parameters where an answer begins."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from nanoengine.core.messages import StepPlan
from nanoengine.core.model_runner import ModelRunner, RunnerPart
from nanoengine.core.sampler import LogitsProcessor
from nanoengine.features.sampling.thinking import ENDS_OF_THOUGHTS, ThoughtsEnd


class ForcedTokens(LogitsProcessor):
    """Forces a token of a row: the logits of all others become -inf."""

    def __init__(self) -> None:
        self.pieces: dict[int, int] = {}  # row -> token

    def apply(self, logits: Tensor, numbers: np.ndarray, rows: np.ndarray, drafts: Any) -> None:
        for number in numbers.tolist():
            token = self.pieces[int(rows[number])]
            logit = logits[number, token].clone()
            logits[number].fill_(-float("inf"))
            logits[number, token] = logit


class ThinkingRunnerPart(RunnerPart):
    """Carries out `ThoughtsEnd`."""

    def __init__(self, runner: ModelRunner):
        self.sampler, self.processor = runner.sampler, ForcedTokens()
        runner.sampler.processors.append(self.processor)
        runner.parts.append(self)

    def begin(self, plan: StepPlan) -> None:
        orders: ThoughtsEnd | None = plan.extras.get(ENDS_OF_THOUGHTS)
        self.processor.pieces = {} if orders is None else orders.forced
        if orders is not None and orders.answers:
            self.sampler.apply(StepPlan(started=orders.answers))
