"""Reordered: a weight slot whose rows stand in another order than those of the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoengine.kernels.interface import QuantizedSlot, WeightSlot
from nanoengine.quantization.tensor import QuantizedTensor


class Reordered:
    """Rows come in groups of as many as `order` has. Of the first `count` groups, row i is row `order[i]` of that group in what
    is copied; rows behind them stay where they are.
    """

    def __init__(self, slot: WeightSlot, order: Sequence[int], count: int):
        self.slot, self.order, self.count = slot, order, count
        self.shape = slot.shape

    def copy_(self, source: Tensor) -> None:
        self.slot.copy_(source[self._rows(source.device)])

    def copy_quantized(self, source: QuantizedTensor) -> None:
        assert isinstance(self.slot, QuantizedSlot)  # of a matrix: nothing else is quantized
        self.slot.copy_quantized(source[self._rows(torch.device("cpu"))])

    def _rows(self, device: torch.device) -> Tensor:
        rows = torch.arange(self.shape[0], dtype=torch.int64, device=device)
        groups = rows[: self.count * len(self.order)].view(self.count, -1)
        groups.copy_(groups[:, torch.tensor(self.order, dtype=torch.int64, device=device)])
        return rows
