"""ForcedDrafts: tokens that are forced by a grammar become drafts, which ordinary verification accepts."""

from __future__ import annotations

from collections.abc import Iterable

from nanoengine.core.sequence import Sequence
from nanoengine.features.draft_constraint import CONSTRAINT, DraftConstraint
from nanoengine.features.speculation.drafter import Candidate, Drafter, until_end
from nanoengine.features.speculation.options import MAX_DRAFTS


class ForcedDrafts(Drafter):
    """The drafts of constrained sequences in an engine without speculation. Most are accepted, so as many as possible are
    verified.

    A draft is rejected where the mask allows another tokenization of the same text.

    Args:
        num_rows: most samples of a step without drafts: the memory of logits.
        vocab_size: of the model; its tokenizer may have more tokens.
    """

    is_idle = True

    def __init__(self, num_rows: int, vocab_size: int):
        self.num_rows, self.vocab_size = num_rows, vocab_size

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
