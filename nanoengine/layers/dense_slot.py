"""DenseSlot: a weight slot that takes dense tensors alone; what a checkpoint has quantized is dequantized for it."""

from __future__ import annotations

from torch import Tensor

from nanoengine.core.kernels import WeightSlot


class DenseSlot:
    def __init__(self, slot: WeightSlot):
        self.slot, self.shape = slot, slot.shape

    def copy_(self, source: Tensor) -> None:
        self.slot.copy_(source)
