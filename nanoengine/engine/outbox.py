"""Outbox: what the executor must hear of sequences beside their runs, kept until a plan in which they run.

If such a plan fails, so do the sequences that it computes: what it was to tell of them nobody misses. Rows that are free again
are told to save memory; each ends at its next start in any case.
"""

from __future__ import annotations

from nanoengine.engine.messages import Started, StepPlan
from nanoengine.engine.sequence import Sequence


class Outbox:
    """Rows that began anew, rows that are free again, and masks."""

    def __init__(self) -> None:
        self._restarted: list[Sequence] = []
        self._ended: list[int] = []
        self.masks: dict[Sequence, bytes] = {}
        self.new_masks: set[Sequence] = set()

    def tell_start(self, plan: StepPlan, seq: Sequence) -> None:
        """The row of a sequence that is in this plan begins with all that the sequence has."""
        tables = tuple(table.copy() for table in seq.block_tables)
        plan.started.append(Started(seq.row, seq.token_ids.copy(), tables, seq.sampling))
        if seq in self.masks:
            self.new_masks.add(seq)

    def restart(self, seq: Sequence) -> None:
        """Tokens and blocks of a decoding sequence are others now."""
        self._restarted.append(seq)

    def restarts(self, seq: Sequence) -> bool:
        """Whether its whole table will be told."""
        return seq in self._restarted

    def set_mask(self, seq: Sequence, mask: bytes | None) -> None:
        if mask is None:
            self.masks.pop(seq, None)
        else:
            self.masks[seq] = mask
        self.new_masks.add(seq)

    def stop(self, seq: Sequence) -> None:
        """A sequence gives its row back."""
        self._ended.append(seq.row)
        if seq in self._restarted:
            self._restarted.remove(seq)

    def forget(self, seq: Sequence) -> None:
        """It has ended."""
        self.masks.pop(seq, None)
        self.new_masks.discard(seq)

    def tell_restarts(self, plan: StepPlan) -> None:
        """All sequences that decode run in this plan."""
        for seq in self._restarted:
            self.tell_start(plan, seq)
        self._restarted = []

    def send(self, plan: StepPlan, samplers: list[Sequence]) -> None:
        """The rest, of the sequences that sample in this plan."""
        plan.ended, self._ended = self._ended, []
        if self.new_masks:
            told = [seq for seq in samplers if seq in self.new_masks]
            plan.masks = [(seq.row, self.masks.get(seq)) for seq in told]
            self.new_masks.difference_update(told)
