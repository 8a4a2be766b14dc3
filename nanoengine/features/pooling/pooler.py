"""Pooler: the policy's part of embeddings. It says which steps are looked at, and makes vectors of what the runner has pooled."""

from __future__ import annotations

from typing import Any

import numpy as np

from nanoengine.core.messages import StepResult
from nanoengine.core.scheduler import Step
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Request, Sequence
from nanoengine.features import EMBEDDING
from nanoengine.features.pooling.files import Made
from nanoengine.features.pooling.params import PoolingParams

WANTED = "pooled runs"
"""In `StepPlan.extras`: place of a run in `runs` -> `RowSampling`, of those whose prompts are pooled."""

POOLED = "pooled"
"""In `StepResult.extras`: [(place of a run in `runs`, what was pooled of its row: [hidden_size] float64)]."""

LEAST_LENGTH = 1e-12
"""A shorter vector is divided by this much."""


class Pooler(PolicyPart):
    """Fills in the embedding of each request with `PoolingParams`.

    Args:
        made: how the model's embeddings are made.
        hidden_size: their dimensions.
    """

    def __init__(self, made: Made, hidden_size: int):
        self.default, self.hidden_size = made, hidden_size
        self.is_idle, self._num_running = True, 0

    def made(self, request: Request) -> None:
        if isinstance(request.params, PoolingParams):
            request.params = request.params.of_model(*self.default, self.hidden_size)

    def submitted(self, request: Request) -> None:
        params = request.params
        if not isinstance(params, PoolingParams):
            return
        self.is_idle, self._num_running = False, self._num_running + 1
        if params.pooling == "mean":
            request.sequences[0].reads_cache = False  # the mean is of all tokens: all are computed

    def complete(self, step: Step) -> None:
        wanted = {place: seq.sampling for place, seq in enumerate(step.runs) if isinstance(seq.params, PoolingParams)}
        if wanted:
            step.plan.extras[WANTED] = wanted
            step.plan.needs_hidden = True

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        if step.is_dropped or isinstance(result, BaseException):
            return
        for place, pooled in result.extras.get(POOLED, ()):
            seq = step.runs[place]
            assert isinstance(seq.params, PoolingParams)
            seq.state[EMBEDDING] = vector(pooled, seq.params)

    def concerns(self, seq: Sequence) -> bool:
        return isinstance(seq.params, PoolingParams)

    def finished(self, seq: Sequence) -> None:
        self._num_running -= isinstance(seq.params, PoolingParams)
        self.is_idle = not self._num_running


def vector(pooled: np.ndarray[Any, Any], params: PoolingParams) -> np.ndarray[Any, Any]:
    """Cut, and then of length 1 if that is wanted. Sums are in float64, and in numpy's own order: no library decides it."""
    own = pooled[: params.dimensions]
    if params.normalize:
        own = own / max(float(np.sqrt(np.sum(own * own))), LEAST_LENGTH)
    return own.astype(np.float32)
