"""RowProcessor: a LogitsProcessor with data for some rows, which is packed on the device for the samples of a step.

Most rows need no more than a draw. The cost of a processor is only that of its samples: it selects them among the rows of a step,
packs their data into a few tensors, and sends these only when rows or samples have changed.
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
"""Rows of [vocab_size] in one operation: it bounds the temporary memory."""

RowData = TypeVar("RowData")


class RowProcessor(LogitsProcessor, Generic[RowData]):
    """A processor with data for rows: `start` of a subclass calls `put` for a row. While no row has data, nothing else is called.

    Args:
        num_rows: number of rows.
        device: of the packed data.
    """

    def __init__(self, num_rows: int, device: Device):
        self.device = device
        self.pieces: dict[int, RowData] = {}
        self._ends = np.zeros(num_rows, dtype=np.int64)
        self._samples = b""  # the samples of `_packed`, with their rows
        self._packed: list[Tensor] = []

    def pack(self, numbers: np.ndarray, pieces: list[RowData]) -> Sequence[np.ndarray]:
        """Arrays with the data of some samples; `numbers` are the indices of the samples, in the same order."""
        raise NotImplementedError

    def put(self, row: int, piece: RowData, until: int = FOREVER) -> None:
        """Set the data of a row, for tokens at positions below `until`."""
        self._ends[row] = until
        self.pieces[row] = piece
        self._samples = b""

    def send(self, numbers: np.ndarray, rows: np.ndarray) -> list[Tensor]:
        """The packed data of these samples, on the device: the same tensors as long as nothing changes."""
        of = rows[numbers]
        samples = numbers.tobytes() + of.tobytes()
        if samples != self._samples:
            arrays = self.pack(numbers, [self.pieces[row] for row in of.tolist()])
            self._packed = [self.device.send(array) for array in arrays]
            self._samples = samples
        return self._packed

    # ---- called by the sampler

    def end(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.pieces.pop(row, None)
            self._ends[row] = 0

    def find(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Indices of the samples whose rows have data for their positions."""
        return np.flatnonzero(self._ends[rows] > positions)


def with_params(started: Sequence[Started]) -> Iterator[tuple[Started, SamplingParams]]:
    """The rows whose params are `SamplingParams`, and not only those of the core."""
    for start in started:
        if isinstance(start.sampling.params, SamplingParams):
            yield start, start.sampling.params


def row_slices(count: int) -> Iterator[slice]:
    """Slices that cover `count` rows, at most ROWS_AT_ONCE rows each."""
    for first in range(0, count, ROWS_AT_ONCE):
        yield slice(first, min(first + ROWS_AT_ONCE, count))
