"""Weight slots that change a tensor of a checkpoint on its way into the weights of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from nanoengine.kernels.operations import ExpertWeights, QuantizedSlot, WeightSlot
from nanoengine.kernels.quantized.tensor import QuantizedExperts, QuantizedTensor

PAIR = {2: torch.int32, 4: torch.int64}
"""An integer type with room for two numbers of so many bytes."""


class Changed:
    """`change` makes of each tensor what is copied to `slot`. Quantized tensors are dequantized for it.

    Args:
        shape: of the tensors in the checkpoint. None: that of `slot`.
    """

    def __init__(self, slot: WeightSlot, change: Callable[[Tensor], Tensor], shape: Sequence[int] | None = None):
        self.slot, self.change = slot, change
        self.shape = slot.shape if shape is None else torch.Size(shape)

    def copy_(self, source: Tensor) -> None:
        self.slot.copy_(self.change(source))


class Unused:
    """For a tensor of this shape that files may have, and the model does not read."""

    def __init__(self, *shape: int):
        self.shape = torch.Size(shape)

    def copy_(self, source: Tensor) -> None:
        """Nothing is kept of it."""


def dense(slot: WeightSlot) -> Changed:
    """The same slot for dense tensors alone."""
    return Changed(slot, lambda tensor: tensor)


def shifted(slot: WeightSlot, offset: float) -> Changed:
    """A slot whose numbers are those of the checkpoint plus `offset`, added in float32."""
    return Changed(slot, lambda tensor: tensor.float() + offset)


def taps_first(weight: Tensor) -> Changed:
    """A slot [taps, channels] for filters that checkpoints have as [channels, 1, taps]."""
    taps, channels = weight.shape
    return Changed(weight, lambda tensor: tensor[:, 0].T, (channels, 1, taps))


class Scaled:
    """A slot for a matrix that is multiplied when it is loaded, in float32: quantized tensors are dequantized for it."""

    def __init__(self, slot: WeightSlot, factors: Tensor):
        self.slot, self.factors, self.shape = slot, factors, slot.shape

    def copy_(self, source: Tensor) -> None:
        self.slot.copy_(source.float() * self.factors.to(source.device))

    def parts(self, source: Tensor | QuantizedTensor) -> Iterator[tuple[Tensor | QuantizedTensor, WeightSlot]]:
        numbers = source if isinstance(source, Tensor) else source.dequantize(torch.float32)
        yield numbers.float() * self.factors.to(numbers.device), self.slot


class Reordered:
    """A slot whose rows stand in another order than in the checkpoint. Rows come in groups of as many as `order` has. Of the
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
    """A slot for [..., len(places) * width]: column i belongs to `places[i % len(places)]`."""

    def __init__(self, places: Sequence[Tensor]):
        self.places = places
        self.shape = torch.Size((*places[0].shape[:-1], len(places) * places[0].shape[-1]))

    def copy_(self, source: Tensor) -> None:
        for first, place in enumerate(self.places):
            place.copy_(source[..., first :: len(self.places)])


class ExpertsSlot(ABC):
    """A slot for the matrices of all experts, which a checkpoint has in one tensor of `shape`: those of each of `weights`."""

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
    """For [experts, len(weights) * outputs, inputs]: the rows of each weight behind those of the one before (Granite 4, Qwen3.5,
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
        return [expert[own] for own in rows.split(self.outputs)]


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
            own = torch.arange(expert.shape[0], dtype=torch.int64, device="cpu")
            return [expert[own[first::count]] for first in range(count)]
        if count == 1:
            return [expert.T.contiguous()]
        # A pair crosses over as one integer: torch transposes whole matrices by blocks, but not every second row of one.
        pairs = expert.contiguous().view(PAIR[expert.itemsize]).T.contiguous()
        return pairs.view(expert.dtype).view(*pairs.shape, 2).unbind(-1)
