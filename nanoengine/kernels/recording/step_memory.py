"""StepMemory: memory of the tensors of recorded steps. One step runs at a time, so all recordings share it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

CHUNK_BYTES = 1 << 24
ALIGNED = 64

Chunk = np.ndarray[Any, np.dtype[np.uint8]]


class MemoryPiece(NamedTuple):
    """Bytes [start, end) of a chunk, in use while a tensor lies in them."""

    start: int
    end: int
    owner: StorageWeakRef | None = None


class StepMemory:
    """Memory of tensors, reused once no tensor lies in it: a step whose calls are made again in their order needs no more."""

    def __init__(self) -> None:
        self._chunks: list[tuple[Chunk, list[MemoryPiece]]] = []

    def take(self, like: Tensor) -> Tensor:
        """A tensor of this shape and dtype, unset; the argument itself if it is empty or not contiguous."""
        if not like.numel() or not like.is_contiguous():
            return like
        chunk, pieces, start = self._room(like.nbytes)
        tensor = _tensor(chunk[start : start + like.nbytes], like.dtype, like.shape)
        pieces.append(MemoryPiece(start, start + like.nbytes, StorageWeakRef(tensor.untyped_storage())))
        pieces.sort(key=lambda piece: piece.start)
        return tensor

    def view_of(self, tensor: Tensor) -> Tensor:
        """The same memory, and not counted as in use: what a replay writes there is valid until another tensor may lie there."""
        for chunk, _ in self._chunks:
            start = tensor.data_ptr() - chunk.ctypes.data
            if 0 <= start < chunk.nbytes and tensor.is_contiguous():
                return _tensor(chunk[start : start + tensor.nbytes], tensor.dtype, tensor.shape)
        return tensor

    def _room(self, size: int) -> tuple[Chunk, list[MemoryPiece], int]:
        for chunk, pieces in self._chunks:
            pieces[:] = [piece for piece in pieces if piece.owner is not None and not piece.owner.expired()]
            for before, after in pairwise([MemoryPiece(0, 0), *pieces, MemoryPiece(chunk.nbytes, chunk.nbytes)]):
                start = -(-before.end // ALIGNED) * ALIGNED
                if start + size <= after.start:
                    return chunk, pieces, start
        memory = np.empty(max(size, CHUNK_BYTES) + ALIGNED, dtype=np.uint8)
        first = -memory.ctypes.data % ALIGNED
        self._chunks.append((memory[first:], []))
        return *self._chunks[-1], 0


def _tensor(memory: Chunk, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype).view(shape)
