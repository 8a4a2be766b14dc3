"""StepCost: how long a step is predicted to take, by the work in it."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import NamedTuple

from nanoengine.core.sequence import Sequence


class Work(NamedTuple):
    """Amounts of each kind of work in a step."""

    rows: int = 0  # tokens that are decoded, drafts among them
    prompts: int = 0  # 1 if there are tokens of prompts: such a step is not replayed from a recording
    prompt_tokens: float = 0
    attended: float = 0  # pairs of a token of a prompt and one before it
    logprobs: float = 0  # numbers that are looked up and told


class Rates(NamedTuple):
    """Seconds of one of each; those of rows depend on how many there are."""

    prompts: float
    prompt_tokens: float
    attended: float
    logprobs: float


FIRST_RATES = Rates(1 / 8, 1 / 32, 1e-5, 1 / 64)
"""In units of a step of one row, before steps were measured: about those of a model of 0.6B parameters on two cores."""

FIRST_CURVE = tuple(1 + (2**size - 1) / 16 for size in range(14))
"""Steps of 1, 2, 4, 8 ... rows, in the same unit."""

LEARNING_RATE = 0.1
"""How far one step moves the rates: single steps are noisy."""

RISE, FALL = 0.1, 0.5
"""How far one step moves the curve: what disturbs a step makes it longer."""

FEW = 3
"""Steps of about so many rows that were measured, from which on the curve counts as known there."""

MOST_OFF = 2.0
"""A step that took more than so many times as long as predicted, or as little, counts as if it had taken that."""


class StepCost:
    """Predicts a step's time as the sum of a curve over its rows and of rates of its other work, and learns both from steps that
    were measured.

    Steps that only decode move the curve; all others move each rate by its part of the prediction (exponentiated gradient,
    Kivinen and Warmuth, 1997), so all stay positive. A wrong prediction costs fairness, and changes no token.
    """

    def __init__(self) -> None:
        self.rates, self.curve = FIRST_RATES, list(FIRST_CURVE)
        self._is_measured = False
        self._num_measured = Counter[int]()  # steps at each place of the curve

    def of(self, work: Work) -> float:
        """Seconds of a step; before any was measured, in units of FIRST_RATES."""
        return self.of_rows(work.rows) + sum(self._others(work))

    def _others(self, work: Work) -> list[float]:
        return [rate * amount for rate, amount in zip(self.rates, work[1:], strict=True)]

    def of_rows(self, count: int) -> float:
        """A step that decodes so many tokens; without any, the weights are read as well."""
        if count <= 1:
            return self.curve[0]
        upper = min((count - 1).bit_length(), len(self.curve) - 1)
        low, high = self.curve[upper - 1 : upper + 1]
        return low + (high - low) * (count / 2 ** (upper - 1) - 1)

    def of_told(self, seq: Sequence) -> float:
        """What the log probabilities of a decoded token add."""
        told = told_of(seq, "logprobs")
        return told and told * self.rates.logprobs

    def of_chunk(self, seq: Sequence, start: int, count: int) -> float:
        """What tokens of a prompt add, behind `start` others."""
        rates, told = self.rates, told_of(seq, "prompt_logprobs")
        return count * (rates.prompt_tokens + rates.attended * (start + count / 2) + rates.logprobs * told)

    def is_known(self, rows: int) -> bool:
        """Whether a step of about so many rows was measured."""
        return self._num_measured[(rows - 1).bit_length()] >= FEW

    def learn(self, work: Work, seconds: float) -> None:
        """A step with this work took so long."""
        others = self._others(work)
        predicted = self.of_rows(work.rows) + sum(others)
        if not self._is_measured:  # only the unit is wrong
            off, self._is_measured = seconds / predicted, True
            self.rates, self.curve = Rates(*(off * rate for rate in self.rates)), [off * own for own in self.curve]
            predicted = seconds
        if any(others):
            off = min(max(seconds / predicted, 1 / MOST_OFF), MOST_OFF)
            pairs = zip(self.rates, others, strict=True)
            self.rates = Rates(*(rate * off ** (LEARNING_RATE * part / predicted) for rate, part in pairs))
        else:
            self._bend(work.rows, seconds / predicted)

    def _bend(self, rows: int, off: float) -> None:
        """A step of so many rows took `off` times as long as the curve says."""
        upper = min((rows - 1).bit_length(), len(self.curve) - 1)
        distance = min(2.0 - rows / 2 ** (upper - 1), 1.0) if upper else 0.0  # of the place above
        for place, weight in ((upper, 1 - distance), (upper - 1, distance)):
            if weight and not self._num_measured[place]:
                self.curve[place] *= off**weight
            elif weight:
                near = min(max(off, 1 / MOST_OFF), MOST_OFF)
                self.curve[place] *= near ** (weight * (RISE if off > 1 else FALL))
        self._num_measured[upper] += 1
        # More rows never take less time.
        above = accumulate(self.curve[upper:], max)
        below = list(accumulate(self.curve[upper::-1], min))[:0:-1]
        self.curve = [*below, *above]


def told_of(seq: Sequence, kind: str) -> int:
    """Log probabilities that are told of a token, if its params know of such."""
    count = getattr(seq.params, kind, None)
    return 0 if count is None else 1 + int(count)
