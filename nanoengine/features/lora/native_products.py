"""NativeAdaptedProducts: adapters computed by kernels/native/cpp/lora.cpp. The bits of a row do not depend on other rows: see
docs/determinism.md.

The product comes in float32; one call adds the low-rank products, and then the bias or the gate, and rounds. The adapters of a
step, and its rows, are read from memory at fixed addresses: a recorded step is right for any adapters.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.kernels import Weight
from nanoengine.features.lora.adapted_products import AdaptedProducts, AdapterRows, LowRank
from nanoengine.features.lora.adapter import Adapter
from nanoengine.features.lora.layer_map import LinearLayer
from nanoengine.kernels.native.addresses import DTYPES, address
from nanoengine.kernels.native.operations import NativeKernels, normed
from nanoengine.kernels.native.weights import NativeWeight
from nanoengine.kernels.operations import Around
from nanoengine.kernels.reference.gates import ACTIVATIONS

INPUTS, OUTPUTS = 32, 16
"""Padding of a row of A, and outputs of B in one group (A_GROUP in lora.cpp, GROUP in product.h)."""

PIECE = struct.Struct("=qqqqqqd")
"""`Piece` of lora.cpp."""


class NativeAdaptedProducts(AdaptedProducts):
    """The products of the native kernels.

    Args:
        max_adapters: most adapters at a time.
        max_rows: most rows of a step.
    """

    kernels: NativeKernels

    def __init__(
        self,
        kernels: NativeKernels,
        matrices: Sequence[object],
        layers: Mapping[str, LinearLayer],
        max_adapters: int,
        max_rows: int,
        rows_of_rank: Mapping[int, Sequence[range]] = {},
    ):
        super().__init__(kernels, matrices, layers, torch.device("cpu"), rows_of_rank)
        self._tables = {matrix: np.zeros(max_adapters, np.int64) for matrix in self.numbers.values()}
        self._memory: dict[int, list[object]] = {}  # slot -> the memory behind its addresses
        self._step = np.zeros(1 + 3 * max_adapters, np.int64)
        self._rows = np.zeros(max_rows, np.int64)

    def put(self, slot: int, adapter: Adapter) -> None:
        self.drop(slot)
        memory = self._memory[slot] = []
        for matrix, pieces in self.low_rank_products(adapter).items():
            packed = [(piece, _rows_of_a(piece), _groups_of_b(piece)) for piece in pieces]
            table = struct.pack("=q", len(packed)) + b"".join(
                PIECE.pack(
                    *(piece.first, piece.count, len(piece.a), 8 * a.itemsize),
                    *(address(a, piece.a.dtype), address(b, piece.a.dtype), piece.scale),
                )
                for piece, a, b in packed
            )
            entry = np.frombuffer(table, np.int64).copy()
            memory += [entry, packed]
            self._tables[matrix][slot] = entry.ctypes.data

    def drop(self, slot: int) -> None:
        for table in self._tables.values():
            table[slot] = 0
        self._memory.pop(slot, None)

    def begin(self, groups: Sequence[AdapterRows]) -> None:
        self.is_used, at = bool(groups), 0
        self._step[0] = len(groups)
        for number, (slot, rows) in enumerate(groups):
            self._step[1 + 3 * number : 4 + 3 * number] = slot, at, len(rows)
            self._rows[at : at + len(rows)] = rows
            at += len(rows)

    # ---- replaces the method of the kernels

    def product(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, **around: Unpack[Around]
    ) -> tuple[Tensor, Tensor]:
        if not self.is_changed(weight):
            return self._plain(x, weight, bias, **around)
        norm, residual, activation = around.get("norm"), around.get("residual"), around.get("activation")
        assert isinstance(weight, NativeWeight)
        total, x = x if residual is None else residual, x.contiguous()
        sums, _ = self._plain(x, weight, norm=norm, residual=residual, dtype=torch.float32)
        inputs = *normed(x, residual, norm, weight), address(sums, torch.float32)
        where = self._shape_and_step(x, weight)
        if activation is None:
            out = x.new_empty(sums.shape)
            added = address(bias, x.dtype, weight.shape[0])
            self.kernels.c.adapted_linear(DTYPES[x.dtype], *inputs, added, out.data_ptr(), *where)
            if around.get("dtype") == torch.float32 and bias is None:
                return sums, total  # the kernel has added to `sums`; `out` is rounded from them
        else:
            out = x.new_empty(len(x), weight.shape[0] // 2)
            kinds = DTYPES[x.dtype], ACTIVATIONS.index(activation)
            self.kernels.c.adapted_gated_linear(*kinds, *inputs, out.data_ptr(), *where)
        return out, total

    def _shape_and_step(self, x: Tensor, weight: Weight) -> tuple[int, ...]:
        table = self._tables[self.numbers[id(weight)]]
        addresses = (array.ctypes.data for array in (self._step, self._rows, table))
        return len(x), weight.shape[1], weight.shape[0], *addresses


def _rows_of_a(piece: LowRank) -> Tensor:
    """A, padded with 0: [rank, inputs up to a multiple of INPUTS]."""
    return torch.nn.functional.pad(piece.a, (0, -piece.a.shape[1] % INPUTS)).contiguous()


def _groups_of_b(piece: LowRank) -> Tensor:
    """B by groups of outputs, padded with 0: [groups, rank, OUTPUTS]."""
    padded = torch.nn.functional.pad(piece.b, (0, 0, 0, -len(piece.b) % OUTPUTS))
    return padded.view(-1, OUTPUTS, padded.shape[1]).transpose(1, 2).contiguous()
