"""Shifted: a weight slot whose numbers are those of the checkpoint plus a constant, added once, as they are loaded."""

from __future__ import annotations

from torch import Tensor

from nanoengine.kernels.interface import WeightSlot


class Shifted:
    """What is copied to `slot` gets `offset` added, in float32."""

    def __init__(self, slot: WeightSlot, offset: float):
        self.slot, self.offset = slot, offset
        self.shape = slot.shape

    def copy_(self, source: Tensor) -> None:
        self.slot.copy_(source.float() + self.offset)
