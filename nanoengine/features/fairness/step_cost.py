"""StepCost: how long a step is predicted to take, by the work in it."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from nanoengine.core.sequence import Sequence


class Work(NamedTuple):
    """Amounts of each kind of work in a step."""

    rows: float = 0  # tokens that are decoded, drafts among them
    prompt_tokens: float = 0
    attended: float = 0  # pairs of a token of a prompt and one before it
    logprobs: float = 0  # numbers that are looked up and told


class Rates(NamedTuple):
    """Seconds of one of each."""

    attended: float
    logprobs: float


FIRST_RATES = Rates(1e-5, 1 / 64)
"""In units of a step of one row, before steps were measured: about those of a model of 0.6B parameters on two cores."""

FIRST_DECODES = tuple(1 + (2**place - 1) / 16 for place in range(14))
"""Steps of 1, 2, 4, 8 ... rows that only decode, in the same unit."""

FIRST_PROMPTS = tuple(1 + 2**place / 32 for place in range(14))
"""Steps of so many tokens, some of them of prompts: a recording is not replayed for them."""

LEARNING_RATE = 0.1
"""How far one step moves the rates: single steps are noisy."""

RISE, FALL = 0.1, 0.5
"""How far one step moves a curve: what disturbs a step makes it longer."""

FEW = 3
"""Steps of about so many tokens that were measured, from which on a curve counts as known there: the fastest of the first."""

MOST_OFF = 2.0
"""A step that took more than so many times as long as predicted, or as little, counts as if it had taken that."""


class Curve:
    """Seconds of a step by its number of tokens: one for 1, 2, 4, 8 ... tokens each, and straight lines between. More tokens
    never take less time, and twice as many never more than twice the time: what is measured at one place bounds all others.
    """

    def __init__(self, seconds: Iterable[float]):
        self.seconds = list(seconds)
        self._num_measured = [0.0] * len(self.seconds)  # steps at each place

    def _places(self, count: float) -> tuple[tuple[int, float], tuple[int, float]]:
        """The places on both sides of a number of tokens, and how near each is: 1 on it, 0 on the other."""
        upper = min(max((ceil(count) - 1).bit_length(), 1), len(self.seconds) - 1)
        distance = max(count / 2 ** (upper - 1) - 1, 0.0)
        return (upper - 1, 1 - distance), (upper, distance)

    def at(self, count: float) -> float:
        (lower, near), (upper, far) = self._places(count)
        return near * self.seconds[lower] + far * self.seconds[upper]

    def most(self, seconds: float) -> float:
        """The number of tokens of a step that takes so long."""
        place = next((place for place, own in enumerate(self.seconds) if own > seconds), len(self.seconds) - 1)
        if not place:
            return 0.0
        low, high = self.seconds[place - 1 : place + 1]
        return 2 ** (place - 1) * (1 + (seconds - low) / max(high - low, 1e-9))

    def is_known(self, count: float) -> bool:
        """Whether steps of about so many tokens were measured."""
        return any(near > 0 and self._num_measured[place] >= FEW for place, near in self._places(count))

    def learn(self, count: float, off: float, part: float = 1.0) -> None:
        """A step of so many tokens took `off` times as long as predicted, and the curve is such a part of the prediction."""
        num_measured = self._num_measured
        for place, near in self._places(count):
            if near <= 0:
                continue
            self.seconds[place] *= _moved(off, num_measured[place], RISE, FALL * part) ** (part * near)
            num_measured[place] += near
            if num_measured[place] < FEW:  # what is known stands
                for own, count_there in enumerate(num_measured):
                    if count_there >= FEW:
                        self._bound(place, own)
            for direction in (1, -1):
                own = place
                while 0 <= own + direction < len(num_measured) and self._bound(own + direction, own):
                    own += direction

    def _bound(self, place: int, other: int) -> bool:
        """Keep one place within what another allows. Whether it was outside."""
        seconds, times, before = self.seconds[other], 2.0 ** (place - other), self.seconds[place]
        low, high = (seconds, seconds * times) if times > 1 else (seconds * times, seconds)
        self.seconds[place] = min(max(before, low), high)
        return self.seconds[place] != before


def _moved(off: float, num_measured: float, rise: float, fall: float) -> float:
    """How far a step that took `off` times as long as predicted moves what was measured so often."""
    if num_measured < 1 or (num_measured < FEW and off < 1):
        return off
    return min(max(off, 1 / MOST_OFF), MOST_OFF) ** (rise if off > 1 else fall)


class StepCost:
    """Predicts the time of a step: a curve over its tokens, one for steps that only decode and one for those with prompts, and
    rates of what else is in it.

    A step that was measured moves each by its part of the prediction (exponentiated gradient, Kivinen and Warmuth, 1997), so all
    stay positive. A wrong prediction costs fairness, and changes no token.
    """

    def __init__(self) -> None:
        self.decodes, self.prompts, self.rates = Curve(FIRST_DECODES), Curve(FIRST_PROMPTS), FIRST_RATES
        self._num_measured = [0.0] * len(FIRST_RATES)  # steps of which each rate was the whole
        self._is_measured = False

    def of(self, work: Work) -> float:
        """Seconds of a step; before any was measured, in units of FIRST_RATES."""
        return self.of_tokens(work.rows, work.prompt_tokens) + sum(self._others(work))

    def _others(self, work: Work) -> list[float]:
        return [rate * amount for rate, amount in zip(self.rates, work[2:], strict=True)]

    def of_tokens(self, rows: float, prompt_tokens: float = 0) -> float:
        """What the tokens of a step take."""
        return self.prompts.at(rows + prompt_tokens) if prompt_tokens else self.decodes.at(rows)

    def of_told(self, seqs: Iterable[Sequence]) -> float:
        """What the log probabilities of a decoded token of each add."""
        return self.rates.logprobs * sum([told_of(seq, "logprobs") for seq in seqs if seq.logprobs is not None])

    def of_chunk(self, seq: Sequence, start: int, count: int) -> float:
        """What tokens of a prompt behind `start` others add, beside their number."""
        told = told_of(seq, "prompt_logprobs")
        return count * (self.rates.attended * (start + count / 2) + self.rates.logprobs * told)

    def learn(self, work: Work, seconds: float) -> None:
        """A step with this work took so long."""
        others = self._others(work)
        predicted = self.of_tokens(work.rows, work.prompt_tokens) + sum(others)
        if not self._is_measured:  # only the unit is wrong
            off, self._is_measured = seconds / predicted, True
            self.rates = Rates(*(off * rate for rate in self.rates))
            for curve in (self.decodes, self.prompts):
                curve.seconds = [off * own for own in curve.seconds]
            predicted = seconds
        curve, off = self.prompts if work.prompt_tokens else self.decodes, seconds / predicted
        count = work.rows + work.prompt_tokens
        curve.learn(count, off, curve.at(count) / predicted)
        rates = list(self.rates)
        for place, own in enumerate(others):
            part = own / predicted
            rates[place] *= _moved(off, self._num_measured[place], LEARNING_RATE, LEARNING_RATE) ** part
            self._num_measured[place] += part
        self.rates = Rates(*rates)


def told_of(seq: Sequence, kind: str) -> int:
    """Log probabilities that are told of a token, if its params know of such."""
    count = getattr(seq.params, kind, None)
    return 0 if count is None else 1 + int(count)
