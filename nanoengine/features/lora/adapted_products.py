"""AdaptedProducts: adds adapters to the products of a model's kernels, in plain torch, on any device.

It replaces `product` of the model's kernels. In a step without adapters, and for matrices without adapters, the result is that of
the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.kernels import Weight
from nanoengine.features.lora.adapter import Adapter
from nanoengine.features.lora.layer_map import LinearLayer
from nanoengine.kernels.operations import Around, Kernels

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class AdapterRows(NamedTuple):
    """The rows of a step with one adapter."""

    slot: int
    rows: np.ndarray  # [n] int64, ascending


@dataclass(frozen=True)
class LowRank:
    """A low-rank product: scale * B (A x) is added to outputs [first, first + count) of a matrix."""

    first: int
    count: int
    a: Tensor  # [rank, inputs] bfloat16, if A and B are bfloat16 in the file, or float32; so is b
    b: Tensor  # [count, rank]
    scale: float


def _rows_of(first: int, b: Tensor, ranges: Sequence[range]) -> tuple[int, Tensor]:
    """The part of outputs [first, first + len(b)) in the ranges of a rank: its first output there, and its rows of B. They stay
    adjacent, since ranges ascend.
    """
    rows = torch.cat([torch.arange(each.start, each.stop, dtype=torch.int64, device="cpu") for each in ranges]) - first
    return int((rows < 0).sum()), b[rows[(rows >= 0) & (rows < len(b))]]


class AdaptedProducts:
    """The adapters of a model on its device, and the rows of the step that have them.

    Args:
        kernels: of the model.
        matrices: of the model, see `Decoder`.
        layers: the linear layers, by name.
        device: of the model.
        rows_of_rank: matrix -> ascending ranges of its rows that this rank computes; all rows of other matrices.
    """

    def __init__(
        self,
        kernels: Kernels,
        matrices: Sequence[object],
        layers: Mapping[str, LinearLayer],
        device: torch.device,
        rows_of_rank: Mapping[int, Sequence[range]] = {},
    ):
        self.kernels, self.layers, self.device, self.rows_of_rank = kernels, layers, device, rows_of_rank
        self.numbers = {id(matrices[layer.matrix]): layer.matrix for layer in layers.values()}
        self.adapters: dict[int, dict[int, list[LowRank]]] = {}  # slot -> matrix -> pieces
        self.groups: list[tuple[int, Tensor]] = []  # of the step: slot, rows
        self.is_used = False  # in the step
        self._plain = kernels.product

    def install(self) -> None:
        """Replace `product` of the kernels by that of this class."""
        self.kernels.product = self.product  # type: ignore[method-assign]
        self.kernels.can_fuse = False

    def put(self, slot: int, adapter: Adapter) -> None:
        """Copy an adapter to its slot on the device."""
        self.adapters[slot] = self.low_rank_products(adapter)

    def low_rank_products(self, adapter: Adapter) -> dict[int, list[LowRank]]:
        """The low-rank products of an adapter on the device, by matrix."""
        products: dict[int, list[LowRank]] = {}
        for name, projection in adapter.projections.items():
            layer = self.layers[name]
            a, b = (
                torch.frombuffer(bytearray(numbers), dtype=DTYPES[dtype]).float()
                for numbers, dtype in zip((projection.a, projection.b), projection.dtypes, strict=True)
            )
            dtype = torch.bfloat16 if projection.dtypes == ("BF16", "BF16") else torch.float32
            b = b.view(layer.count, projection.rank) * (1.0 if layer.factors is None else layer.factors)
            a, b = a.view(projection.rank, layer.inputs).to(dtype), b[layer.order].to(dtype)
            a = a if layer.input_order is None else a[:, layer.input_order]
            first = layer.first
            if layer.matrix in self.rows_of_rank:
                first, b = _rows_of(first, b, self.rows_of_rank[layer.matrix])
            if len(b):
                piece = LowRank(first, len(b), a.to(self.device), b.to(self.device), projection.scale)
                products.setdefault(layer.matrix, []).append(piece)
        return products

    def drop(self, slot: int) -> None:
        self.adapters.pop(slot, None)

    def begin(self, groups: Sequence[AdapterRows]) -> None:
        """Set the rows of the next step that have adapters, by adapter."""
        self.is_used = bool(groups)
        self.groups = [(group.slot, torch.from_numpy(group.rows).to(self.device)) for group in groups]

    # ---- replaces the method of the kernels

    def is_changed(self, weight: Weight) -> bool:
        """Whether adapters may change a product of this step."""
        return self.is_used and id(weight) in self.numbers

    def product(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, **around: Unpack[Around]
    ) -> tuple[Tensor, Tensor]:
        if not self.is_changed(weight):
            return self._plain(x, weight, bias, **around)
        factors, total = self.kernels.normed(x, around.get("norm"), around.get("residual"))
        out = self.add(factors, weight, self._plain(factors, weight, bias, dtype=around.get("dtype"))[0])
        activation = around.get("activation")
        return out if activation is None else self.kernels.gate(out, activation), total

    def add(self, x: Tensor, weight: Weight, out: Tensor) -> Tensor:
        """Add the low-rank products of the adapters to their rows of `out`, and return it."""
        for slot, rows in self.groups:
            for piece in self.adapters[slot].get(self.numbers[id(weight)], ()):
                inner = x[rows].float() @ piece.a.float().T * piece.scale
                columns = out[:, piece.first : piece.first + piece.count]
                columns[rows] = (columns[rows].float() + inner @ piece.b.float().T).to(out.dtype)
        return out
