"""A drafter that knows what comes, and lives with it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.sequence import Sequence
from nanoengine.features.speculation.drafter import Candidate, Drafter
from tests.core.lives import Plug


class ToyDrafter(Drafter):
    """Guesses right most of the time.

    Args:
        truth: seq_id -> all tokens of the sequence.
    """

    def __init__(self, truth: dict[int, list[int]], rng: random.Random):
        self.truth, self.rng = truth, rng
        self.num_drafts = self.num_accepted = 0

    def postpone(self, candidates: Iterable[Candidate], num_decodes: int, budget: int) -> set[Sequence]:
        return {own.seq for own in candidates if self.rng.random() < 0.3}

    def choose(
        self, candidates: Iterable[Candidate], num_decodes: int, num_tokens: int, budget: int
    ) -> dict[Sequence, list[int]]:
        chosen: dict[Sequence, list[int]] = {}
        for seq, first, most in candidates:
            count = min(most, budget, self.rng.randint(0, 4))
            truth = self.truth[seq.seq_id][first : first + count]
            guess = [token if self.rng.random() < 0.8 else 3 for token in truth]
            if guess:
                chosen[seq] = guess
                budget -= len(guess)
        return chosen

    def settle(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted


class Drafted(Plug):
    """Half of the engines have a drafter that heeds neither costs nor chances: it leaves some drafts out of a step."""

    rare = (*Plug.rare, "accepted", "rejected")

    def parts(self) -> list[Any]:
        self.drafter = ToyDrafter(self.truth, self.rng)
        return [self.drafter] if self.rng.random() < 0.5 else []

    def after_life(self, engine: LLMEngine) -> None:
        accepted = self.drafter.num_accepted
        self.seen.update(accepted=accepted, rejected=self.drafter.num_drafts - accepted)
