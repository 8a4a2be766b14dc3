"""Acceptance: how likely the drafts of one sequence are to be accepted, from how those before them fared."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

FIRST_GUESS = 0.6
"""What is taken for likely of a sequence that nothing is known of: enough to try."""

LEARNING_RATE = 0.2
"""How far one guess moves what is known: a text may stop being like what came before."""


class Acceptance:
    """For each place in a run of drafts, how often the draft there was accepted where all before it were."""

    def __init__(self, num_drafts: int):
        self._rates = [FIRST_GUESS] * num_drafts

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """Of so many drafts, the first ones were accepted, and the next one was not."""
        for place in range(min(num_accepted + 1, num_drafts)):
            self._rates[place] += LEARNING_RATE * ((place < num_accepted) - self._rates[place])

    def chances(self, num_drafts: int) -> list[float]:
        """How likely the first is accepted, the first two are, and so on."""
        return list(accumulate(self._rates[:num_drafts], mul))
