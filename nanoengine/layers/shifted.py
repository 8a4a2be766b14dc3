"""Shifted: a place in a model whose numbers are those of the checkpoint plus a constant, added once, as they are loaded."""

from __future__ import annotations

from torch import Tensor

from nanoengine.kernels.interface import Destination


class Shifted:
    """What is copied to `place` gets `offset` added, in float32."""

    def __init__(self, place: Destination, offset: float):
        self.place, self.offset = place, offset
        self.shape = place.shape

    def copy_(self, source: Tensor) -> None:
        self.place.copy_(source.float() + self.offset)
