"""StepCost: predicts the time of a step from its amounts of work."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from nanoengine.core.sequence import Sequence


class Work(NamedTuple):
    """Amounts of each kind of work in a step."""

    rows: float = 0  # decoded tokens, drafts included
    prompt_tokens: float = 0
    attended: float = 0  # pairs of a token of a prompt and a token before it
    logprobs: float = 0  # log probabilities that are returned


class Rates(NamedTuple):
    """Seconds for one unit of each kind of work beside tokens."""

    attended: float
    logprobs: float


FIRST_RATES = Rates(1e-5, 1 / 64)
"""Initial rates, in units of a step of one row: about those of a model of 0.6B parameters on two cores."""

FIRST_DECODES = tuple(1 + (2**knot - 1) / 16 for knot in range(14))
"""Initial times of steps of 1, 2, 4, 8 ... rows that only decode, in the same unit."""

FIRST_PROMPTS = tuple(1 + 2**knot / 32 for knot in range(14))
"""Initial times of steps of 1, 2, 4, 8 ... tokens with prompts, for which no recording is replayed."""

LEARNING_RATE = 0.1
"""Weight of one step in the rates: single steps are noisy."""

RISE, FALL = 0.1, 0.5
"""Weights of a slower and of a faster step in a curve: disturbances only make a step longer."""

MIN_MEASURED = 3
"""Measured steps after which a knot of a curve counts as known. Until then, the fastest step counts."""

MAX_RATIO = 2.0
"""Limit of the ratio of the measured time to the predicted time, and of its inverse: outliers are clipped."""


class Curve:
    """Seconds of a step by its number of tokens: piecewise linear, with knots at 1, 2, 4, 8 ... tokens. More tokens never take
    less time, and twice as many never more than twice the time: a measurement at one knot bounds all others.
    """

    def __init__(self, seconds: Iterable[float]):
        self.seconds = list(seconds)
        self._num_measured = [0.0] * len(self.seconds)  # steps at each knot

    def _knots(self, count: float) -> tuple[tuple[int, float], tuple[int, float]]:
        """The knots on both sides of a number of tokens, and the weight of each, 0 to 1."""
        upper = min(max((ceil(count) - 1).bit_length(), 1), len(self.seconds) - 1)
        distance = max(count / 2 ** (upper - 1) - 1, 0.0)
        return (upper - 1, 1 - distance), (upper, distance)

    def at(self, count: float) -> float:
        (lower, weight), (upper, rest) = self._knots(count)
        return weight * self.seconds[lower] + rest * self.seconds[upper]

    def most(self, seconds: float) -> float:
        """The number of tokens of a step of so many seconds."""
        knot = next((knot for knot, time in enumerate(self.seconds) if time > seconds), len(self.seconds) - 1)
        if not knot:
            return 0.0
        low, high = self.seconds[knot - 1 : knot + 1]
        return 2 ** (knot - 1) * (1 + (seconds - low) / max(high - low, 1e-9))

    def is_known(self, count: float) -> bool:
        """Whether steps of about so many tokens were measured."""
        return any(weight > 0 and self._num_measured[knot] >= MIN_MEASURED for knot, weight in self._knots(count))

    def learn(self, count: float, ratio: float, part: float = 1.0) -> None:
        """Learn from a step of so many tokens.

        Args:
            ratio: measured time / predicted time of the step.
            part: of the prediction that is from this curve, 0 to 1.
        """
        num_measured = self._num_measured
        for knot, weight in self._knots(count):
            if weight <= 0:
                continue
            self.seconds[knot] *= _factor(ratio, num_measured[knot], RISE, FALL * part) ** (part * weight)
            num_measured[knot] += weight
            if num_measured[knot] < MIN_MEASURED:  # a known knot bounds it
                for other, count_of_other in enumerate(num_measured):
                    if count_of_other >= MIN_MEASURED:
                        self._bound(knot, other)
            for direction in (1, -1):
                last = knot
                while 0 <= last + direction < len(num_measured) and self._bound(last + direction, last):
                    last += direction

    def _bound(self, knot: int, other: int) -> bool:
        """Clip one knot to the bounds that follow from another. Returns whether it was outside."""
        seconds, times, before = self.seconds[other], 2.0 ** (knot - other), self.seconds[knot]
        low, high = (seconds, seconds * times) if times > 1 else (seconds * times, seconds)
        self.seconds[knot] = min(max(before, low), high)
        return self.seconds[knot] != before


def _factor(ratio: float, num_measured: float, rise: float, fall: float) -> float:
    """The factor of an estimate after a step with this ratio of measured to predicted time."""
    if num_measured < 1 or (num_measured < MIN_MEASURED and ratio < 1):
        return ratio
    return min(max(ratio, 1 / MAX_RATIO), MAX_RATIO) ** (rise if ratio > 1 else fall)


class StepCost:
    """The predicted time of a step: a curve over its tokens, one for steps that only decode and one for steps with prompts, plus
    rates times the other amounts of work.

    A measured step moves each estimate by its part of the prediction (exponentiated gradient, Kivinen and Warmuth, 1997), so all
    stay positive. A wrong prediction costs fairness, and changes no token.
    """

    def __init__(self) -> None:
        self.decodes, self.prompts, self.rates = Curve(FIRST_DECODES), Curve(FIRST_PROMPTS), FIRST_RATES
        self._num_measured = [0.0] * len(FIRST_RATES)  # for each rate, the sum of its parts of measured steps
        self.is_measured = False

    def of(self, work: Work) -> float:
        """Seconds of a step; before any was measured, in units of FIRST_RATES."""
        return self.of_tokens(work.rows, work.prompt_tokens) + sum(self._others(work))

    def _others(self, work: Work) -> list[float]:
        return [rate * amount for rate, amount in zip(self.rates, work[2:], strict=True)]

    def of_tokens(self, rows: float, prompt_tokens: float = 0) -> float:
        """Seconds for the tokens of a step."""
        return self.prompts.at(rows + prompt_tokens) if prompt_tokens else self.decodes.at(rows)

    def of_logprobs(self, seqs: Iterable[Sequence]) -> float:
        """Seconds for the log probabilities of one decoded token of each sequence."""
        return self.rates.logprobs * sum([num_logprobs(seq, "logprobs") for seq in seqs if seq.logprobs is not None])

    def of_chunk(self, seq: Sequence, start: int, count: int) -> float:
        """Seconds for `count` tokens of a prompt behind `start` tokens, without the curve's part."""
        logprobs = self.rates.logprobs * num_logprobs(seq, "prompt_logprobs")
        return count * (self.rates.attended * (start + count / 2) + logprobs)

    def learn(self, work: Work, seconds: float) -> None:
        """Learn from a step with this work and its measured time."""
        others = self._others(work)
        predicted = self.of_tokens(work.rows, work.prompt_tokens) + sum(others)
        if not self.is_measured:  # only the unit is wrong
            ratio, self.is_measured = seconds / predicted, True
            self.rates = Rates(*(ratio * rate for rate in self.rates))
            for curve in (self.decodes, self.prompts):
                curve.seconds = [ratio * time for time in curve.seconds]
            predicted = seconds
        curve, ratio = self.prompts if work.prompt_tokens else self.decodes, seconds / predicted
        count = work.rows + work.prompt_tokens
        curve.learn(count, ratio, curve.at(count) / predicted)
        rates = list(self.rates)
        for index, seconds_of_kind in enumerate(others):
            part = seconds_of_kind / predicted
            rates[index] *= _factor(ratio, self._num_measured[index], LEARNING_RATE, LEARNING_RATE) ** part
            self._num_measured[index] += part
        self.rates = Rates(*rates)


def num_logprobs(seq: Sequence, kind: str) -> int:
    """The number of log probabilities that are returned for each token."""
    count = getattr(seq.params, kind, None)
    return 0 if count is None else 1 + int(count)
