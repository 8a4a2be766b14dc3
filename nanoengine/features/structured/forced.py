"""ForcedDrafts: what a grammar leaves no choice about are drafts, which ordinary verification accepts."""

from __future__ import annotations

from collections.abc import Iterable

from nanoengine.core.sequence import Sequence
from nanoengine.features.draft_constraint import CONSTRAINT, DraftConstraint
from nanoengine.features.speculation.drafter import Candidate, Drafter, until_end
from nanoengine.features.speculation.options import MAX_DRAFTS


class ForcedDrafts(Drafter):
    """The drafts of constrained sequences where nothing else guesses. Most are accepted, so as many as may be are
    verified.

    A draft is wrong where the mask holds another spelling of the same text.

    Args:
        num_rows: most samples of a step without drafts, for which there is memory.
        vocab_size: of the model; its tokenizer may have more tokens.
    """

    def __init__(self, num_rows: int, vocab_size: int):
        self.num_rows, self.vocab_size = num_rows, vocab_size
        self.num_drafts = self.num_accepted = 0

    def postpone(self, candidates: Iterable[Candidate], num_decodes: int, budget: int) -> Iterable[Sequence]:
        return ()

    def choose(
        self, candidates: Iterable[Candidate], num_decodes: int, num_tokens: int, budget: int
    ) -> dict[Sequence, list[int]]:
        budget = min(budget, self.num_rows - num_decodes)
        chosen: dict[Sequence, list[int]] = {}
        for seq, _, most in candidates:
            constraint: DraftConstraint | None = seq.state.get(CONSTRAINT)
            if budget > 0 and constraint is not None and getattr(seq.params, "speculate", True):
                forced = constraint.forced(min(most, budget, MAX_DRAFTS))
                if drafts := until_end(forced, seq, self.vocab_size):
                    chosen[seq] = drafts
                    budget -= len(drafts)
        return chosen

    def settle(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
