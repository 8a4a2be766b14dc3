"""CommonBlocks: how many first blocks all decodes of a step share, so that a backend may read these once for all of them."""

from __future__ import annotations

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.messages import StepPlan
from nanoengine.engine.sequence import Sequence


class CommonBlocks:
    """Counts them for one step after the other: most often nobody has come or gone."""

    def __init__(self, block_manager: BlockManager):
        self._block_manager = block_manager
        self._common_to: list[Sequence] = []
        self._counts: list[int] = []

    def count(self, plan: StepPlan, decoded: list[Sequence], drafted: list[Sequence]) -> list[int]:
        """Of each group, the first blocks that the decodes of a plan share, those with drafts among them.

        Args:
            decoded: whose decodes they are: the same list as long as nobody comes or goes.
            drafted: whose runs with drafts.
        """
        if drafted:
            return self._count_with_drafts(plan, [*decoded, *drafted])
        if decoded and decoded is not self._common_to:
            self._counts, self._common_to = self._count(decoded), decoded
        return self._counts if decoded else []

    def _count(self, decoded: list[Sequence]) -> list[int]:
        if len(decoded) == 1:
            return []
        if any(self._counts):  # only newcomers can make it less: who has gone and come back has the same tokens there
            known = set(self._common_to)
            stayed = [seq for seq in decoded if seq in known]
            if stayed:
                seqs = [stayed[0], *(seq for seq in decoded if seq not in known)]
                if len(seqs) == 1:
                    return self._counts
                counts = self._block_manager.get_num_common_prefix_blocks(seqs)
                return list(map(min, counts, self._counts))
        return self._block_manager.get_num_common_prefix_blocks(decoded)

    def _count_with_drafts(self, plan: StepPlan, seqs: list[Sequence]) -> list[int]:
        """They count as longer than they are: no new token of a run is in a shared block."""
        if len(seqs) == 1:
            return []
        least = min([*plan.decodes.num_computed.tolist(), *(run.num_computed for run in plan.drafted)])
        most = least // self._block_manager.block_size
        return [min(count, most) for count in self._block_manager.get_num_common_prefix_blocks(seqs)]
