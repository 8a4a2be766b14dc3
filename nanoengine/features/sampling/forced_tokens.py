"""The runner's part of thinking: tokens that are forced, and answers that are sampled otherwise than their thoughts."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from nanoengine.core.messages import StepPlan
from nanoengine.core.model_runner import ModelRunner, RunnerPart
from nanoengine.core.sampler import LogitsProcessor
from nanoengine.features.sampling.thinking import ENDS_OF_THOUGHTS, ThoughtsEnd


class ForcedTokens(LogitsProcessor):
    """-inf for all tokens of a row but one."""

    def __init__(self) -> None:
        self.pieces: dict[int, int] = {}  # row -> its token

    def apply(self, logits: Tensor, numbers: np.ndarray, rows: np.ndarray, drafts: Any) -> None:
        for number in numbers.tolist():
            token = self.pieces[int(rows[number])]
            logit = logits[number, token].clone()
            logits[number].fill_(-float("inf"))
            logits[number, token] = logit


class ThinkingRunner(RunnerPart):
    """Carries out `ThoughtsEnd`."""

    def __init__(self, runner: ModelRunner):
        self.sampler, self.processor = runner.sampler, ForcedTokens()
        runner.sampler.processors.append(self.processor)
        runner.parts.append(self)

    def begin(self, plan: StepPlan) -> None:
        told: ThoughtsEnd | None = plan.extras.get(ENDS_OF_THOUGHTS)
        self.processor.pieces = {} if told is None else told.forced
        if told is not None and told.answers:
            self.sampler.apply(StepPlan(started=told.answers))
