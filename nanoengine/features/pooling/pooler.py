"""Pooler: the policy's part of embeddings. It orders the pooling of runs, and makes vectors of the pooled hidden states."""

from __future__ import annotations

from typing import Any

import numpy as np

from nanoengine.core.messages import StepResult
from nanoengine.core.scheduler import Step
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Request, Sequence
from nanoengine.features import EMBEDDING
from nanoengine.features.pooling.files import PoolingDefaults
from nanoengine.features.pooling.params import PoolingParams

POOLED_RUNS = "pooled runs"
"""In `StepPlan.extras`: index of a run in `runs` -> `RowSampling`, for runs of embedding requests."""

POOLED = "pooled"
"""In `StepResult.extras`: [(index of a run in `runs`, pooled hidden state of its row: [hidden_size] float64)]."""

LEAST_LENGTH = 1e-12
"""A shorter vector is divided by this length."""


class Pooler(PolicyPart):
    """Sets the embedding of each request with `PoolingParams`.

    Args:
        defaults: of the model.
        hidden_size: of the model.
    """

    def __init__(self, defaults: PoolingDefaults, hidden_size: int):
        self.defaults, self.hidden_size = defaults, hidden_size
        self.is_idle, self._num_running = True, 0

    def made(self, request: Request) -> None:
        if isinstance(request.params, PoolingParams):
            request.params = request.params.of_model(*self.defaults, self.hidden_size)

    def submitted(self, request: Request) -> None:
        params = request.params
        if not isinstance(params, PoolingParams):
            return
        self.is_idle, self._num_running = False, self._num_running + 1
        if params.pooling == "mean":
            request.sequences[0].reads_cache = False  # all tokens are computed, for the mean

    def complete(self, step: Step) -> None:
        pooled = {index: seq.sampling for index, seq in enumerate(step.runs) if isinstance(seq.params, PoolingParams)}
        if pooled:
            step.plan.extras[POOLED_RUNS] = pooled
            step.plan.needs_hidden = True

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        if step.is_dropped or isinstance(result, BaseException):
            return
        for index, pooled in result.extras.get(POOLED, ()):
            seq = step.runs[index]
            assert isinstance(seq.params, PoolingParams)
            seq.state[EMBEDDING] = vector(pooled, seq.params)

    def concerns(self, seq: Sequence) -> bool:
        return isinstance(seq.params, PoolingParams)

    def finished(self, seq: Sequence) -> None:
        self._num_running -= isinstance(seq.params, PoolingParams)
        self.is_idle = not self._num_running


def vector(pooled: np.ndarray[Any, Any], params: PoolingParams) -> np.ndarray[Any, Any]:
    """The embedding: cut to `dimensions`, and normalized. The sum is in float64 and in numpy's order: no BLAS library changes
    it.
    """
    cut = pooled[: params.dimensions]
    if params.normalize:
        cut = cut / max(float(np.sqrt(np.sum(cut * cut))), LEAST_LENGTH)
    return cut.astype(np.float32)
