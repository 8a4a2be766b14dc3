"""CommonPrefix: the number of first blocks that all decodes of a step have in common, so that attention may read these once."""

from __future__ import annotations

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.scheduler import Step
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Sequence


class CommonPrefix(PolicyPart):
    """Fills `StepPlan.num_common_blocks`. In most steps the decodes are those of the last step, and nothing is counted."""

    def __init__(self, blocks: BlockManager):
        self.blocks = blocks
        self._decodes: list[Sequence] = []  # of the counts
        self._counts: list[int] = []

    def complete(self, step: Step) -> None:
        if step.started and not set(step.started).isdisjoint(self._decodes):  # their tables are new
            self._decodes = []
        plan = step.plan
        if num_drafted := plan.num_drafted:
            seqs = [*step.decodes, *step.runs[:num_drafted]]
            starts = [*plan.decode_starts.tolist(), *(run.start for run in plan.runs[:num_drafted])]
            plan.num_common_blocks = self._count(seqs, min(starts))
        elif len(step.decodes) < 2:
            self._decodes, self._counts = [], []
        else:
            if step.decodes != self._decodes:
                self._counts = self._recount(step.decodes, int(plan.decode_starts.min()))
                self._decodes = step.decodes
            plan.num_common_blocks = self._counts

    def _recount(self, seqs: list[Sequence], least: int) -> list[int]:
        """The counts of other decodes. Of those that remain, one is enough: the new ones can only lower the counts."""
        known = set(self._decodes) if any(self._counts) else set()
        stayed = [seq for seq in seqs if seq in known]
        if not stayed:
            return self._count(seqs, least)
        newcomers = [seq for seq in seqs if seq not in known]
        if not newcomers:
            return self._counts
        return list(map(min, self._count([stayed[0], *newcomers], least), self._counts))

    def _count(self, seqs: list[Sequence], least: int) -> list[int]:
        """For each group, the number of first blocks that sequences have in common, all before position `least`. A group with a
        window has none: its first blocks were freed.
        """
        if len(seqs) == 1:
            return []
        counts, references = [], self.blocks.ref_counts
        for group, table in enumerate(seqs[0].block_tables):
            # Most often there is no common block: the number of references shows that at once.
            end = 0 if self.blocks.layouts[group].forgets else least // self.blocks.block_size
            end = next((i for i, block in enumerate(table[:end]) if references[block] < len(seqs)), end)
            tables = [seq.block_tables[group][:end] for seq in seqs] if end else [[]]
            first, last = min(tables), max(tables)  # the common prefix of these two is that of all
            counts.append(next((i for i, (a, b) in enumerate(zip(first, last, strict=True)) if a != b), end))
        return counts
