"""Products: what adapters add to the linear layers of a model. The class here computes it in plain torch, on any device.

It takes the place of `product` of the model's kernels. In a step without adapters, and for matrices that no adapter
changes, that is what it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.kernels import Weight
from nanoengine.features.lora.adapter import Adapter
from nanoengine.features.lora.places import Place
from nanoengine.kernels.operations import Kernels, Norm

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Group(NamedTuple):
    """The rows of a step that have the same adapter."""

    slot: int
    rows: np.ndarray  # [n] int64, ascending


@dataclass(frozen=True)
class Piece:
    """A low-rank product: outputs [first, first + count) of a matrix get scale * B (A x) more."""

    first: int
    count: int
    a: Tensor  # [rank, inputs]: bfloat16, if both are so in their file, and otherwise float32; so is b
    b: Tensor  # [count, rank]
    scale: float


Kept = Mapping[int, Sequence[range]]
"""Of a matrix, the rows that are computed here, one range behind the other; all rows of matrices that are not there."""


def pieces_of(adapter: Adapter, places: Mapping[str, Place], kept: Kept) -> dict[int, list[Piece]]:
    """The tensors of an adapter, by the matrix that they change."""
    found: dict[int, list[Piece]] = {}
    for name, own in adapter.projections.items():
        place = places[name]
        a, b = (
            torch.frombuffer(bytearray(numbers), dtype=DTYPES[dtype]).float()
            for numbers, dtype in zip((own.a, own.b), own.dtypes, strict=True)
        )
        dtype = torch.bfloat16 if own.dtypes == ("BF16", "BF16") else torch.float32
        b = b.view(place.count, own.rank) * (1.0 if place.factors is None else place.factors)
        a, b = a.view(own.rank, place.inputs).to(dtype), b[place.order].to(dtype)
        a = a if place.input_order is None else a[:, place.input_order]
        first = place.first
        if place.matrix in kept:
            first, b = _rows_of(first, b, kept[place.matrix])
        if len(b):
            found.setdefault(place.matrix, []).append(Piece(first, len(b), a, b, own.scale))
    return found


def _rows_of(first: int, b: Tensor, kept: Sequence[range]) -> tuple[int, Tensor]:
    """The part of outputs [first, first + len(b)) that this rank computes: its first output here, and its rows of B.

    They stay side by side: ranges ascend.
    """
    rows = torch.cat([torch.arange(own.start, own.stop, dtype=torch.int64, device="cpu") for own in kept]) - first
    return int((rows < 0).sum()), b[rows[(rows >= 0) & (rows < len(b))]]


class Products:
    """The adapters of a model on its device, and the rows of the step that have them.

    Args:
        kernels: of the model.
        matrices: of the model, see `Decoder`.
        places: of the linear layers.
        device: of the model.
        kept: what is computed here of each matrix.
    """

    def __init__(
        self,
        kernels: Kernels,
        matrices: Sequence[object],
        places: Mapping[str, Place],
        device: torch.device,
        kept: Mapping[int, Sequence[range]] = {},
    ):
        self.kernels, self.places, self.device, self.kept = kernels, places, device, kept
        self.numbers = {id(matrices[place.matrix]): place.matrix for place in places.values()}
        self.adapters: dict[int, dict[int, list[Piece]]] = {}  # slot -> matrix -> pieces
        self.groups: list[tuple[int, Tensor]] = []  # of the step: slot, rows
        self.is_used = False  # in the step
        self._plain = kernels.product

    def install(self) -> None:
        """Replace `product` of the kernels by that of this class."""
        self.kernels.product = self.product  # type: ignore[method-assign]
        self.kernels.can_fuse = False

    def put(self, slot: int, adapter: Adapter) -> None:
        """Keep an adapter on the device under its slot."""
        found = pieces_of(adapter, self.places, self.kept)
        self.adapters[slot] = {
            matrix: [Piece(o.first, o.count, o.a.to(self.device), o.b.to(self.device), o.scale) for o in pieces]
            for matrix, pieces in found.items()
        }

    def drop(self, slot: int) -> None:
        self.adapters.pop(slot, None)

    def begin(self, groups: Sequence[Group]) -> None:
        """Note which rows of the next step have adapters, by adapter."""
        self.is_used = bool(groups)
        self.groups = [(group.slot, torch.from_numpy(group.rows).to(self.device)) for group in groups]

    # ---- in place of the kernels' own

    def is_changed(self, weight: Weight) -> bool:
        """Whether adapters may change a product of this step."""
        return self.is_used and id(weight) in self.numbers

    def product(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        activation: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not self.is_changed(weight):
            return self._plain(x, weight, bias, norm=norm, residual=residual, activation=activation, dtype=dtype)
        factors, total = self.kernels.normed(x, norm, residual)
        out = self.add(factors, weight, self._plain(factors, weight, bias, dtype=dtype)[0])
        return out if activation is None else self.kernels.gate(out, activation), total

    def add(self, x: Tensor, weight: Weight, out: Tensor) -> Tensor:
        """Add the low-rank products of the adapters to their rows of `out`, and return it."""
        for slot, rows in self.groups:
            for piece in self.adapters[slot].get(self.numbers[id(weight)], ()):
                inner = x[rows].float() @ piece.a.float().T * piece.scale
                columns = out[:, piece.first : piece.first + piece.count]
                columns[rows] = (columns[rows].float() + inner @ piece.b.float().T).to(out.dtype)
        return out
