"""Experts whose matrices a checkpoint has in one tensor: inputs before outputs, rows of gate and up in turn (gpt-oss)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoengine.kernels.interface import ExpertWeights


class InterleavedExperts:
    """A place for [experts, inputs, len(weights) * outputs]: output i of each expert belongs to `weights[i % len(weights)]`."""

    def __init__(self, *weights: ExpertWeights):
        self.weights = weights
        experts, outputs, inputs = weights[0].shape
        self.shape = torch.Size((experts, inputs, len(weights) * outputs))

    def copy_(self, source: Tensor) -> None:
        for number, expert in enumerate(source):
            rows = expert.T
            for first, weights in enumerate(self.weights):
                weights.expert(number).copy_(rows[first :: len(self.weights)].contiguous())


class InterleavedColumns:
    """A place for [..., len(places) * width]: column i belongs to `places[i % len(places)]`."""

    def __init__(self, places: Sequence[Tensor]):
        self.places = places
        self.shape = torch.Size((*places[0].shape[:-1], len(places) * places[0].shape[-1]))

    def copy_(self, source: Tensor) -> None:
        for first, place in enumerate(self.places):
            place.copy_(source[..., first :: len(self.places)])
