"""SamplingPart: the processors of a runner, log probabilities of prompts, and other parameters at the end of a thought."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from nanoengine.core.inputs import InputBatch
from nanoengine.core.messages import StepPlan, StepResult
from nanoengine.core.model_runner import ModelRunner, RunnerPart
from nanoengine.features.sampling.collector import PROMPT_LOGPROBS
from nanoengine.features.sampling.logit_offsets import LogitBias, MinTokensBan
from nanoengine.features.sampling.logprobs import LogprobColumns, SampleLogprobs, compute_logprobs
from nanoengine.features.sampling.penalties import Penalties
from nanoengine.features.sampling.thinking import ENDS_OF_THOUGHTS
from nanoengine.features.sampling.token_masks import TokenMasks


class SamplingPart(RunnerPart):
    """Adds the processors to a runner's sampler, in the order in which they change logits, computes log probabilities of
    prompts, and carries out the orders of `ThinkingPart`.
    """

    def __init__(self, runner: ModelRunner):
        self.runner, sampler = runner, runner.sampler
        num_rows, vocab_size, device = runner.rows.padding_row, sampler.vocab_size, runner.device
        sampler.processors.insert(0, SampleLogprobs(num_rows, sampler))
        sampler.processors += [
            TokenMasks(num_rows, vocab_size, device),
            MinTokensBan(num_rows, vocab_size, device),
            LogitBias(num_rows, device),
            Penalties(num_rows, vocab_size, device),
        ]
        runner.parts.append(self)

    def begin(self, plan: StepPlan) -> None:
        if orders := plan.extras.get(ENDS_OF_THOUGHTS):
            self.runner.sampler.apply(StepPlan(started=orders))

    def after_forward(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> Callable[[StepResult], None] | None:
        orders = plan.extras.get(PROMPT_LOGPROBS)
        if not orders:
            return None
        counts = [run.num_new for run in plan.runs]
        firsts = len(plan.decode_rows) + np.cumsum([0, *counts[:-1]])
        parts: list[tuple[int, list[int], int, LogprobColumns]] = []
        for index, length, count in orders:
            run, first = plan.runs[index], int(firsts[index])
            tokens = self.runner.rows.token_ids[run.row][run.start + 1 : run.start + 1 + length]
            parts.append((index, tokens, count, self._compute(hidden[first : first + length], tokens, count)))

        def read(result: StepResult) -> None:
            result.extras[PROMPT_LOGPROBS] = [
                (index, columns.entries(tokens, [count] * len(tokens))) for index, tokens, count, columns in parts
            ]

        return read

    def _compute(self, hidden: Tensor, token_ids: list[int], count: int) -> LogprobColumns:
        """Log probabilities of n tokens, each behind one of [n, hidden_size]. The logits are computed in slices."""
        ids = self.runner.device.send(np.array(token_ids, dtype=np.int64))
        return compute_logprobs(lambda part: self.runner.model.compute_logits(hidden[part]), ids, count)
