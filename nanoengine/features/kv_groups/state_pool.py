"""StatePool: the states of all running sequences, and their snapshots."""

from __future__ import annotations

import math

import torch

from nanoengine.core.attention import KVLayer
from nanoengine.kernels.memory import zeros_in_huge_pages

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of the parts of a layer's state."""


class StatePool:
    """Slots, each with the states of all layers side by side, so that a slot is one copy: one for each row of the runner, one for
    padding, then those of snapshots. On a CPU, pages are allocated when a slot is first written.

    Args:
        block_bytes: of a block of the KV pool.

    Attributes:
        pieces: [num_slots * num_pieces, bytes] uint8: the slots in pieces that are no larger than a block.
    """

    def __init__(
        self,
        num_rows: int,
        num_snapshots: int,
        num_layers: int,
        shapes: Shapes,
        block_bytes: int,
        device: torch.device,
    ):
        numbers = num_layers * sum(map(math.prod, shapes))
        self.num_pieces = -(-numbers // (block_bytes // 4))
        size = num_rows + 1 + num_snapshots, -(-numbers // self.num_pieces) * self.num_pieces
        on_cpu = device.type == "cpu"
        dtype = torch.float32
        self.slots = zeros_in_huge_pages(size, dtype) if on_cpu else torch.zeros(size, dtype=dtype, device=device)
        self.pieces = self.slots.view(torch.uint8).view(len(self.slots) * self.num_pieces, -1)
        self.layers: list[KVLayer] = []
        at = 0
        for _ in range(num_layers):
            parts = []
            for shape in shapes:
                count = math.prod(shape)
                parts.append(self.slots[:, at : at + count].unflatten(1, shape) if count else self.slots[:, :0])
                at += count
            self.layers.append((parts[0], parts[1]))

    def copy(self, source: int, target: int) -> None:
        self.slots[target].copy_(self.slots[source])
