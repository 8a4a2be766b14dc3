"""Acceptance: how likely the drafts of one sequence are to be accepted, from how those before them fared."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

FIRST_GUESS = 0.6
"""The rate of a sequence of which nothing is known: enough to try."""

LEARNING_RATE = 0.2
"""How far one run of drafts moves the rates of its sequence, at least: a text may stop being what it was."""

SLOW_RATE = 0.02
"""The same for the rates of all sequences together, with which the next sequence begins."""

FIRST_RATE = 0.5
"""How far the first run does."""

FADING = 0.01
"""How far a step without a try moves the rates back towards the first guess."""


class Acceptance:
    """For each place in a run of drafts, how often the draft there was accepted where all before it were.

    Args:
        num_drafts: most places.
        learning_rate: how far one run at least moves what is known.
        like: what to begin with.
    """

    def __init__(self, num_drafts: int, learning_rate: float = LEARNING_RATE, like: Acceptance | None = None):
        self._learning_rate = learning_rate
        self._times_tried = [0] * num_drafts
        self._rates: list[float] = [FIRST_GUESS] * num_drafts if like is None else like._rates.copy()

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """Of so many drafts, the first ones were accepted, and the next one was not."""
        for place in range(min(num_accepted + 1, num_drafts)):
            rate = max(1 / (1 / FIRST_RATE + self._times_tried[place]), self._learning_rate)
            self._rates[place] += rate * ((place < num_accepted) - self._rates[place])
            self._times_tried[place] += 1

    def fade(self) -> None:
        """Nothing was tried: what is known becomes less certain."""
        self._rates = [rate + FADING * (FIRST_GUESS - rate) for rate in self._rates]

    def chances(self, num_drafts: int) -> list[float]:
        """How likely the first is accepted, the first two are, and so on."""
        return list(accumulate(self._rates[:num_drafts], mul))
