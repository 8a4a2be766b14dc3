"""PoolingPart: the runner's part of embeddings. It pools the hidden states of prompts, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanoengine.core.inputs import InputBatch
from nanoengine.core.messages import RowSampling, Run, StepPlan, StepResult
from nanoengine.core.model_runner import RunnerPart
from nanoengine.features.pooling.params import PoolingParams
from nanoengine.features.pooling.pooler import POOLED, POOLED_RUNS


class PoolingPart(RunnerPart):
    """Pools hidden states. A mean is summed up token by token, in float64: the number does not depend on the chunks of the
    prompt, or on the rest of its steps.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}  # row -> sum over its tokens so far

    def after_forward(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> Callable[[StepResult], None] | None:
        wanted: dict[int, RowSampling] | None = plan.extras.get(POOLED_RUNS)
        if wanted is None:
            return None
        sent: list[tuple[int, Tensor]] = []
        at = len(plan.decode_rows)
        for index, run in enumerate(plan.runs):
            states, at = hidden[at : at + run.num_new], at + run.num_new
            if index not in wanted:
                continue
            pooled = self._pool(run, wanted[index], states)
            if run.samples:  # it ends with the last token of the prompt
                sent.append((index, pooled.to("cpu", non_blocking=True)))

        def read(result: StepResult) -> None:
            result.extras[POOLED] = [(index, pooled.numpy()) for index, pooled in sent]

        return read

    def _pool(self, run: Run, sampling: RowSampling, states: Tensor) -> Tensor:
        """The pooled hidden state of a row behind a run: [hidden_size] float64."""
        params = sampling.params
        assert isinstance(params, PoolingParams)
        if params.pooling == "last":
            return states[-1].to(torch.float64)
        if not run.start:  # a prompt with a mean has no prefix hit
            self._sums[run.row] = torch.zeros(states.shape[1], dtype=torch.float64, device=states.device)
        total = self._sums.pop(run.row) if run.samples else self._sums[run.row]
        for state in states:
            total += state
        return total / sampling.num_prompt_tokens
