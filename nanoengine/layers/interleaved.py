"""Experts whose matrices a checkpoint has in one tensor: inputs before outputs, rows of gate and up in turn (gpt-oss)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoengine.kernels.interface import ExpertWeights

PAIR = {2: torch.int32, 4: torch.int64}
"""What holds two numbers of so many bytes."""


class InterleavedExperts:
    """A place for [experts, inputs, len(weights) * outputs]: output i of each expert belongs to `weights[i % len(weights)]`."""

    def __init__(self, *weights: ExpertWeights):
        assert len(weights) <= 2
        self.weights = weights
        experts, outputs, inputs = weights[0].shape
        self.shape = torch.Size((experts, inputs, len(weights) * outputs))

    def copy_(self, source: Tensor) -> None:
        for number, expert in enumerate(source):
            for weights, rows in zip(self.weights, self._transposed(expert), strict=True):
                weights.expert(number).copy_(rows)

    def _transposed(self, expert: Tensor) -> tuple[Tensor, ...]:
        """[inputs, len(weights) * outputs] -> [outputs, inputs] for each weight."""
        if len(self.weights) == 1:
            return (expert.T.contiguous(),)
        # A pair crosses over as one integer: torch transposes whole matrices by blocks, but not every second row of one.
        pairs = expert.contiguous().view(PAIR[expert.itemsize]).T.contiguous()
        return pairs.view(expert.dtype).view(*pairs.shape, 2).unbind(-1)


class InterleavedColumns:
    """A place for [..., len(places) * width]: column i belongs to `places[i % len(places)]`."""

    def __init__(self, places: Sequence[Tensor]):
        self.places = places
        self.shape = torch.Size((*places[0].shape[:-1], len(places) * places[0].shape[-1]))

    def copy_(self, source: Tensor) -> None:
        for first, place in enumerate(self.places):
            place.copy_(source[..., first :: len(self.places)])
