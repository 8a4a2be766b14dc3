"""Rules that change the logits of some rows, and `RowPieces`: what a rule keeps of each of its rows, packed for a step.

Most rows want no more than a draw. Whatever a rule costs is paid by the samples that it binds: it finds them among the rows of a
step, packs what it knows of theirs into a few tensors, and sends these only when rows or samples have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from torch import Tensor

from nanoengine.engine.messages import Started
from nanoengine.runner.drafts import Drafts, Verified
from nanoengine.runner.stream import Stream, send_array

FOREVER = 2**62
"""A position that no sequence reaches."""

ROWS_AT_ONCE = 64
"""Rows of a vocabulary's width that are worked on at once: it bounds the memory that this takes."""

NO_SAMPLES = np.zeros(0, dtype=np.int64)

T = TypeVar("T")


class RowRule(Protocol):
    """One kind of wish. All calls come in the order of the device's work.

    Samples are named by their numbers, places in `rows`: the row that each sample of the step goes into.
    """

    def start(self, started: Sequence[Started]) -> None:
        """Take up those of the rows that have this wish. They begin anew: `end` was called for all of them."""
        ...

    def end(self, rows: Iterable[int]) -> None:
        """Forget rows, whether or not they had this wish."""
        ...

    def find(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Numbers of the samples that it binds; `positions`: where in its sequence each token will stand."""
        ...

    def apply(self, logits: Tensor, numbers: np.ndarray, rows: np.ndarray, drafts: Drafts | None) -> None:
        """Change the logits [n, vocab_size] of the samples that `find` found. NaN and infinity must stay visible.

        Args:
            drafts: those of the step, which count as tokens for the samples behind them; None if there are none, and then no row
                has two samples.
        """
        ...

    def observe(self, tokens: Tensor, numbers: np.ndarray, rows: np.ndarray, verified: Verified | None) -> None:
        """Take note of what was sampled: [n] int64 tokens, negative where there is none.

        Args:
            verified: the drafts, and which of the samples are tokens; None: all are.
        """
        ...


class RowPieces(Generic[T]):
    """What is known of some rows, on the host, and packed on the device for the samples of a step.

    Args:
        num_rows: rows are below it.
        stream: where packed pieces are sent.
        pack: arrays that hold the pieces of some samples, whose numbers it is given.
    """

    def __init__(
        self,
        num_rows: int,
        stream: Stream,
        pack: Callable[[np.ndarray, list[T]], Sequence[np.ndarray]],
    ):
        self._stream, self._pack = stream, pack
        self._pieces: dict[int, T] = {}
        self._ends = np.zeros(num_rows, dtype=np.int64)
        self._samples = b""  # those that were packed last
        self._packed: list[Tensor] = []

    def __getitem__(self, row: int) -> T:
        return self._pieces[row]

    def __contains__(self, row: int) -> bool:
        return row in self._pieces

    def put(self, row: int, piece: T, until: int = FOREVER) -> None:
        """Keep the piece of a row, for tokens at positions below `until`."""
        self._pieces[row] = piece
        self._ends[row] = until
        self._samples = b""

    def drop(self, row: int) -> None:
        if self._pieces.pop(row, None) is not None:
            self._ends[row] = 0

    def find(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Numbers of the samples whose rows have a piece."""
        return np.flatnonzero(self._ends[rows] > positions) if self._pieces else NO_SAMPLES

    def send(self, numbers: np.ndarray, rows: np.ndarray) -> list[Tensor]:
        """The packed pieces of these samples, on the device: the same tensors as long as nothing changes."""
        of = rows[numbers]
        samples = numbers.tobytes() + of.tobytes()
        if samples != self._samples:
            arrays = self._pack(numbers, [self._pieces[row] for row in of.tolist()])
            self._packed = [send_array(array, self._stream) for array in arrays]
            self._samples = samples
        return self._packed


def row_slices(count: int) -> Iterator[slice]:
    """All of some rows, a bounded number at a time."""
    for first in range(0, count, ROWS_AT_ONCE):
        yield slice(first, min(first + ROWS_AT_ONCE, count))
