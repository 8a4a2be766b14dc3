"""The runner's part of embeddings: it pools the hidden states of prompts, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanoengine.core.inputs import InputBatch
from nanoengine.core.messages import RowSampling, StepPlan, StepResult
from nanoengine.core.model_runner import RunnerPart
from nanoengine.features.pooling.params import PoolingParams
from nanoengine.features.pooling.pooler import POOLED


class PoolingPart(RunnerPart):
    """Keeps a sum for each row that wants a mean. A mean is added up token by token, in float64: it is the same number however a
    prompt is cut into chunks, and whatever else is in its steps.
    """

    def __init__(self) -> None:
        self._rows: dict[int, RowSampling] = {}  # those that want an embedding
        self._sums: dict[int, Tensor] = {}  # of the tokens so far

    def begin(self, plan: StepPlan) -> None:
        for row in (*plan.ended, *(start.row for start in plan.started)):
            self._rows.pop(row, None)
            self._sums.pop(row, None)
        for start in plan.started:
            if isinstance(start.sampling.params, PoolingParams):
                self._rows[start.row] = start.sampling

    def after_forward(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> Callable[[StepResult], None] | None:
        if not self._rows:
            return None
        found: list[tuple[int, Tensor]] = []
        at = len(plan.decode_rows)
        for place, run in enumerate(plan.runs):
            states, at = hidden[at : at + run.num_new], at + run.num_new
            sampling = self._rows.get(run.row)
            if sampling is None:
                continue
            pooled = self._pool(run.row, sampling, states)
            if run.samples:  # it ends with the last token of the prompt
                found.append((place, pooled.to("cpu", non_blocking=True)))
        if not found:
            return None

        def read(result: StepResult) -> None:
            result.extras[POOLED] = [(place, pooled.numpy()) for place, pooled in found]

        return read

    def _pool(self, row: int, sampling: RowSampling, states: Tensor) -> Tensor:
        """What there is of a row with the hidden states of its next tokens: [hidden_size] float64."""
        params = sampling.params
        assert isinstance(params, PoolingParams)
        if params.pooling == "last":
            return states[-1].to(torch.float64)
        total = self._sums.setdefault(row, torch.zeros(states.shape[1], dtype=torch.float64, device=states.device))
        for state in states:
            total += state
        return total / sampling.num_prompt_tokens
