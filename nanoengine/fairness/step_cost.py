"""StepCost: how long a step is predicted to take, by the work in it, and what of it is a client's."""

from __future__ import annotations

from typing import NamedTuple

from nanoengine.core.sequence import Sequence


class Work(NamedTuple):
    """Amounts of each kind of work."""

    steps: float = 0  # what a step takes without any row: the weights are read, programs are launched
    rows: float = 0  # tokens that are decoded, drafts among them
    prompt_tokens: float = 0
    attended: float = 0  # pairs of a token of a prompt and one before it
    logprobs: float = 0  # numbers that are looked up and told


FIRST_RATES = Work(1.0, 1 / 16, 1 / 32, 1e-5, 1 / 64)
"""In units of a step without rows, before steps were measured: about those of a model of 0.6B parameters on two cores."""

LEARNING_RATE = 0.1
"""How far one step moves the rates: single steps are noisy."""

MOST_OFF = 2.0
"""A step that took more than so many times as long as predicted, or as little, counts as if it had taken that."""


class StepCost:
    """Predicts a step's time as a sum over kinds of work, and learns the rates from steps that were measured.

    A step moves each rate by its part of the prediction (exponentiated gradient, Kivinen and Warmuth, 1997), so all stay
    positive. A wrong prediction costs fairness, and changes no token.
    """

    def __init__(self) -> None:
        self.rates = FIRST_RATES
        self._is_measured = False

    def of(self, work: Work) -> float:
        """Seconds; before any step was measured, in units of FIRST_RATES."""
        return sum(rate * amount for rate, amount in zip(self.rates, work, strict=True))

    def of_rows(self, seq: Sequence, count: int = 1) -> float:
        """What decoded tokens of a sequence add to a step."""
        rates, told = self.rates, told_of(seq, "logprobs")
        return count * (rates.rows + rates.logprobs * told) if told else count * rates.rows

    def of_chunk(self, seq: Sequence, start: int, count: int) -> float:
        """What tokens of a prompt add, behind `start` others."""
        rates, told = self.rates, told_of(seq, "prompt_logprobs")
        return count * (rates.prompt_tokens + rates.attended * (start + count / 2) + rates.logprobs * told)

    def learn(self, work: Work, seconds: float) -> None:
        """A step with this work took so long."""
        predicted = self.of(work)
        if not self._is_measured:  # only the unit is wrong
            self.rates, self._is_measured = Work(*(rate * seconds / predicted for rate in self.rates)), True
            return
        off = min(max(seconds / predicted, 1 / MOST_OFF), MOST_OFF)
        parts = (rate * amount / predicted for rate, amount in zip(self.rates, work, strict=True))
        self.rates = Work(*(rate * off ** (LEARNING_RATE * part) for rate, part in zip(self.rates, parts, strict=True)))


def told_of(seq: Sequence, kind: str) -> int:
    """Log probabilities that are told of a token, if its params know of such."""
    count = getattr(seq.params, kind, None)
    return 0 if count is None else 1 + int(count)
