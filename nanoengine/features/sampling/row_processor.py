"""RowProcessor: a LogitsProcessor that keeps a piece for each row that asks, packed on the device for the samples of a step.

Most rows want no more than a draw. Whatever a processor costs is paid by the samples that it is for: it finds them among the rows
of a step, packs what it knows of theirs into a few tensors, and sends these only when rows or samples have changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
from torch import Tensor

from nanoengine.core.device import Device
from nanoengine.core.messages import Started
from nanoengine.core.sampler import LogitsProcessor
from nanoengine.features.sampling.params import SamplingParams

FOREVER = 2**62
"""A position that no sequence reaches."""

ROWS_AT_ONCE = 64
"""Rows of a vocabulary's width that are worked on at once: it bounds the memory that this takes."""

Piece = TypeVar("Piece")


class RowProcessor(LogitsProcessor, Generic[Piece]):
    """`start` of a subclass calls `put` for the rows that ask for it. While nobody asks, nothing else is called.

    Args:
        num_rows: rows are below it.
        device: where packed pieces are sent.
    """

    def __init__(self, num_rows: int, device: Device):
        self.device = device
        self.pieces: dict[int, Piece] = {}
        self._ends = np.zeros(num_rows, dtype=np.int64)
        self._samples = b""  # those that were packed last
        self._packed: list[Tensor] = []

    def pack(self, numbers: np.ndarray, pieces: list[Piece]) -> Sequence[np.ndarray]:
        """Arrays with the pieces of some samples; `numbers` are those of the samples, in the same order."""
        raise NotImplementedError

    def put(self, row: int, piece: Piece, until: int = FOREVER) -> None:
        """Keep the piece of a row, for tokens at positions below `until`."""
        self._ends[row] = until
        self.pieces[row] = piece
        self._samples = b""

    def send(self, numbers: np.ndarray, rows: np.ndarray) -> list[Tensor]:
        """The packed pieces of these samples, on the device: the same tensors as long as nothing changes."""
        of = rows[numbers]
        samples = numbers.tobytes() + of.tobytes()
        if samples != self._samples:
            arrays = self.pack(numbers, [self.pieces[row] for row in of.tolist()])
            self._packed = [self.device.send(array) for array in arrays]
            self._samples = samples
        return self._packed

    # ---- what the sampler calls

    def end(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.pieces.pop(row, None)
            self._ends[row] = 0

    def find(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Numbers of the samples whose rows have a piece that counts at their positions."""
        return np.flatnonzero(self._ends[rows] > positions)


def asking(started: Sequence[Started]) -> Iterator[tuple[Started, SamplingParams]]:
    """Rows with params of this package: those of the core ask for nothing that is done here."""
    for start in started:
        if isinstance(start.sampling.params, SamplingParams):
            yield start, start.sampling.params


def row_slices(count: int) -> Iterator[slice]:
    """Slices that cover `count` rows, at most ROWS_AT_ONCE rows each."""
    for first in range(0, count, ROWS_AT_ONCE):
        yield slice(first, min(first + ROWS_AT_ONCE, count))
