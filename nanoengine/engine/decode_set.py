"""DecodeSet: the sequences that get one new token in every decode step, in columns.

In a steady state a step moves a clock on and touches no sequence: how many tokens each has follows from the clock. A sequence is
looked at when it comes, when it goes, and when its next check is due: a block is full, or its last token is to be sampled.
"""

from __future__ import annotations

import numpy as np

from nanoengine.engine.messages import Decodes
from nanoengine.engine.sequence import Sequence

NEVER = np.iinfo(np.int64).max


class DecodeSet:
    """Sequences of which all tokens but the last are computed, in the order in which they came.

    Attributes:
        clock: decode steps so far.
        seqs: whoever is given this list may keep it: it is never changed, only replaced.
    """

    def __init__(self) -> None:
        self.clock = 0
        self.seqs: list[Sequence] = []
        self._rows: np.ndarray = np.zeros(0, np.int32)
        self._offsets: np.ndarray = np.zeros(0, np.int64)  # computed tokens, less the clock
        self._checks: np.ndarray = np.zeros(0, np.int64)  # when to look at each
        self._next_check = 0  # the least of them
        self._come: list[Sequence] = []
        self._gone: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self.seqs) - len(self._gone) + len(self._come)

    def members(self) -> list[Sequence]:
        """Those that the next step decodes."""
        return [*(seq for seq in self.seqs if seq not in self._gone), *self._come]

    def add(self, seq: Sequence) -> None:
        """All tokens of `seq` but the last are computed, or on their way."""
        seq.join(self)
        self._come.append(seq)

    def remove(self, seq: Sequence) -> None:
        if not seq.decoding:
            return
        seq.leave()
        if seq in self._come:
            self._come.remove(seq)
        else:
            self._gone.add(seq)

    def due(self) -> list[tuple[int, Sequence]]:
        """Who has to be looked at before the next step, in the order of the sequences, and the place of each until then.

        They are looked at again when `check_again` says, or else before every step.
        """
        if self._come or self._gone:
            self._refresh()
        if self._next_check > self.clock or not self.seqs:
            return []
        places = np.flatnonzero(self._checks <= self.clock).tolist()
        self._next_check = NEVER  # `advance` looks for the next
        return sorted(((place, self.seqs[place]) for place in places), key=_order)

    def check_again(self, places: list[int], positions: list[int]) -> None:
        """Look at sequences again before the steps that compute their tokens at these positions."""
        self._checks[places] = np.array(positions, np.int64) - self._offsets[places]

    def advance(self) -> Decodes:
        """One more step of all."""
        if self._gone:  # preempted while room was made for others
            self._refresh()
        if self._next_check == NEVER:
            self._next_check = int(self._checks.min())
        decodes = Decodes(self._rows, (self._offsets + self.clock).astype(np.int32))
        self.clock += 1
        return decodes

    def _refresh(self) -> None:
        """Bring the columns up to date, all changes at once; newcomers are looked at in the next step."""
        if self._gone:
            kept = [i for i, seq in enumerate(self.seqs) if seq not in self._gone]
            self.seqs = [self.seqs[i] for i in kept]
            self._rows, self._offsets, self._checks = self._rows[kept], self._offsets[kept], self._checks[kept]
            self._gone = set()
        if self._come:
            come = self._come
            self.seqs = [*self.seqs, *come]
            self._rows = np.append(self._rows, np.array([seq.row for seq in come], np.int32))
            offsets = [seq.num_computed_tokens - self.clock for seq in come]
            self._offsets = np.append(self._offsets, np.array(offsets, np.int64))
            self._checks = np.append(self._checks, np.full(len(come), self.clock, np.int64))
            self._come = []
        if self.seqs:
            self._next_check = int(self._checks.min())

    def check(self) -> None:
        """Raise AssertionError if the columns do not say what the sequences do."""
        for i, seq in enumerate(self.seqs):
            if seq not in self._gone:
                assert seq.decoding
                assert seq.row == self._rows[i]
                assert seq.num_computed_tokens == self._offsets[i] + self.clock
        assert len({*self.seqs} - self._gone) + len(self._come) == len(self)


def _order(due: tuple[int, Sequence]) -> tuple[int, int]:
    return due[1].order
