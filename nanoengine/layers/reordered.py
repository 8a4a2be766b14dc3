"""Reordered: a place in a model whose rows stand in another order than those of the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoengine.kernels.interface import Destination


class Reordered:
    """Row i of the place is row `order[i]` of what is copied to it."""

    def __init__(self, place: Destination, order: Sequence[int]):
        self.place, self.order = place, order
        self.shape = place.shape

    def copy_(self, source: Tensor) -> None:
        self.place.copy_(source[torch.tensor(self.order, device=source.device)])
