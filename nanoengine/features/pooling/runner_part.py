"""The runner's part of embeddings: it pools the hidden states of prompts, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanoengine.core.inputs import InputBatch
from nanoengine.core.messages import RowSampling, Run, StepPlan, StepResult
from nanoengine.core.model_runner import RunnerPart
from nanoengine.features.pooling.params import PoolingParams
from nanoengine.features.pooling.pooler import POOLED, WANTED


class PoolingPart(RunnerPart):
    """Keeps a sum for each row that wants a mean. A mean is added up token by token, in float64: it is the same number however a
    prompt is cut into chunks, and whatever else is in its steps.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}  # of a row: of its tokens so far

    def after_forward(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> Callable[[StepResult], None] | None:
        wanted: dict[int, RowSampling] | None = plan.extras.get(WANTED)
        if wanted is None:
            return None
        found: list[tuple[int, Tensor]] = []
        at = len(plan.decode_rows)
        for place, run in enumerate(plan.runs):
            states, at = hidden[at : at + run.num_new], at + run.num_new
            if place not in wanted:
                continue
            pooled = self._pool(run, wanted[place], states)
            if run.samples:  # it ends with the last token of the prompt
                found.append((place, pooled.to("cpu", non_blocking=True)))

        def read(result: StepResult) -> None:
            result.extras[POOLED] = [(place, pooled.numpy()) for place, pooled in found]

        return read

    def _pool(self, run: Run, sampling: RowSampling, states: Tensor) -> Tensor:
        """What there is of a row with the hidden states of a run of it: [hidden_size] float64."""
        params = sampling.params
        assert isinstance(params, PoolingParams)
        if params.pooling == "last":
            return states[-1].to(torch.float64)
        if not run.start:  # nothing of a prompt whose mean is wanted comes from the cache
            self._sums[run.row] = torch.zeros(states.shape[1], dtype=torch.float64, device=states.device)
        total = self._sums.pop(run.row) if run.samples else self._sums[run.row]
        for state in states:
            total += state
        return total / sampling.num_prompt_tokens
