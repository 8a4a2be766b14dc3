"""Weight slots that convert a tensor of a checkpoint before it is copied to the weights of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from nanoengine.kernels.operations import ExpertWeights, QuantizedSlot, WeightSlot
from nanoengine.kernels.quantized.tensor import QuantizedExperts, QuantizedTensor

PAIR = {2: torch.int32, 4: torch.int64}
"""Bytes of a number -> the integer type of two such numbers."""


class Changed:
    """A slot that copies `change(tensor)` to `slot`. Quantized tensors are dequantized first.

    Args:
        shape: of the tensors in the checkpoint. None: that of `slot`.
    """

    def __init__(self, slot: WeightSlot, change: Callable[[Tensor], Tensor], shape: Sequence[int] | None = None):
        self.slot, self.change = slot, change
        self.shape = slot.shape if shape is None else torch.Size(shape)

    def copy_(self, source: Tensor) -> None:
        self.slot.copy_(self.change(source))


class Unused:
    """A slot for a tensor of this shape that files may have and the model ignores."""

    def __init__(self, *shape: int):
        self.shape = torch.Size(shape)

    def copy_(self, source: Tensor) -> None:
        """Ignore the tensor."""


def dense(slot: WeightSlot) -> Changed:
    """A slot for dense tensors alone: quantized ones are dequantized."""
    return Changed(slot, lambda tensor: tensor)


def shifted(slot: WeightSlot, offset: float) -> Changed:
    """A slot that adds `offset` in float32."""
    return Changed(slot, lambda tensor: tensor.float() + offset)


def taps_first(weight: Tensor) -> Changed:
    """A slot [taps, channels] for filters [channels, 1, taps] of a checkpoint."""
    taps, channels = weight.shape
    return Changed(weight, lambda tensor: tensor[:, 0].T, (channels, 1, taps))


class Scaled:
    """A slot that multiplies a matrix in float32 at load: quantized tensors are dequantized first."""

    def __init__(self, slot: WeightSlot, factors: Tensor):
        self.slot, self.factors, self.shape = slot, factors, slot.shape

    def copy_(self, source: Tensor) -> None:
        self.slot.copy_(source.float() * self.factors.to(source.device))

    def parts(self, source: Tensor | QuantizedTensor) -> Iterator[tuple[Tensor | QuantizedTensor, WeightSlot]]:
        numbers = source if isinstance(source, Tensor) else source.dequantize(torch.float32)
        yield numbers.float() * self.factors.to(numbers.device), self.slot


class Reordered:
    """A slot whose rows have another order than in the checkpoint. Groups of rows have the length of `order`. Of the
    first `count` groups, row i is row `order[i]` of that group in the checkpoint; later rows stay where they are.
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


class InterleavedColumns:
    """A slot for [..., len(weights) * width]: column i belongs to `weights[i % len(weights)]`."""

    def __init__(self, weights: Sequence[Tensor]):
        self.weights = weights
        self.shape = torch.Size((*weights[0].shape[:-1], len(weights) * weights[0].shape[-1]))

    def copy_(self, source: Tensor) -> None:
        for first, weight in enumerate(self.weights):
            weight.copy_(source[..., first :: len(self.weights)])


class ExpertsSlot(ABC):
    """A slot for one tensor of `shape` in a checkpoint with the matrices of all experts, for each of `weights`."""

    shape: torch.Size

    def __init__(self, *weights: ExpertWeights):
        self.weights = weights

    @abstractmethod
    def matrices(self, expert: Tensor | QuantizedTensor) -> Sequence[Tensor | QuantizedTensor]:
        """[outputs, inputs] of one expert for each of the weights."""

    def parts(self, source: Tensor | QuantizedExperts) -> Iterator[tuple[Tensor | QuantizedTensor, WeightSlot]]:
        """Each matrix of an expert, and its slot."""
        for number in range(self.shape[0]):
            expert = source[number] if isinstance(source, Tensor) else source.expert(number)
            for weights, matrix in zip(self.weights, self.matrices(expert), strict=True):
                yield matrix, weights.expert(number)

    def copy_(self, source: Tensor) -> None:
        for matrix, slot in self.parts(source):
            assert isinstance(matrix, Tensor)
            slot.copy_(matrix)


class StackedExperts(ExpertsSlot):
    """For [experts, len(weights) * outputs, inputs]: the concatenated rows of the weights (Granite 4, Qwen3.5,
    Llama 4). With `transposed`, the checkpoint has inputs before outputs.
    """

    def __init__(self, *weights: ExpertWeights, transposed: bool = False):
        super().__init__(*weights)
        self.transposed = transposed
        experts, self.outputs, inputs = weights[0].shape
        rows = len(weights) * self.outputs
        self.shape = torch.Size((experts, inputs, rows) if transposed else (experts, rows, inputs))

    def matrices(self, expert: Tensor | QuantizedTensor) -> Sequence[Tensor | QuantizedTensor]:
        if self.transposed:
            assert isinstance(expert, Tensor)  # rows of blocks cannot become columns
            expert = expert.T.contiguous()
        rows = torch.arange(len(self.weights) * self.outputs, dtype=torch.int64, device="cpu")
        return [expert[part] for part in rows.split(self.outputs)]


class InterleavedExperts(ExpertsSlot):
    """For [experts, inputs, len(weights) * outputs]: output i of each expert belongs to `weights[i % len(weights)]` (gpt-oss)."""

    def __init__(self, *weights: ExpertWeights):
        assert len(weights) <= 2
        super().__init__(*weights)
        experts, outputs, inputs = weights[0].shape
        self.shape = torch.Size((experts, inputs, len(weights) * outputs))

    def matrices(self, expert: Tensor | QuantizedTensor) -> Sequence[Tensor | QuantizedTensor]:
        count = len(self.weights)
        if not isinstance(expert, Tensor):
            rows = torch.arange(expert.shape[0], dtype=torch.int64, device="cpu")
            return [expert[rows[first::count]] for first in range(count)]
        if count == 1:
            return [expert.T.contiguous()]
        # Pairs are transposed as one integer: torch transposes whole matrices by blocks, but not every second row.
        pairs = expert.contiguous().view(PAIR[expert.itemsize]).T.contiguous()
        return pairs.view(expert.dtype).view(*pairs.shape, 2).unbind(-1)
