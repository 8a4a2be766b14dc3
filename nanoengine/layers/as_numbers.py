"""AsNumbers: a place in a model that takes numbers alone; what a checkpoint has quantized is dequantized for it."""

from __future__ import annotations

from torch import Tensor

from nanoengine.kernels.interface import Destination


class AsNumbers:
    def __init__(self, place: Destination):
        self.place, self.shape = place, place.shape

    def copy_(self, source: Tensor) -> None:
        self.place.copy_(source)
