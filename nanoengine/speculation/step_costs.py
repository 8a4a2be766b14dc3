"""StepCosts: how long a step takes by the number of its tokens, measured at start-up and corrected by every step since."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

LEARNING_RATE = 0.1
"""How far one step moves what is known of steps of its size: single ones are noisy."""

LEAST_HOPE, MOST_HOPE = 0.001, 0.05
"""How far one step moves the times of larger sizes towards its own: of a size that was taken often, and of one that never was.
A size that seems dear is never tried, so its time would never be put right. Trying now and then in vain costs next to nothing.
"""

MOST_OFF = 2.0
"""A step that took more than so many times as long as expected, or as little, counts as if it had taken that."""


class StepCosts:
    """Seconds of a step of so many tokens, between measured sizes in proportion; beyond the largest, each token costs as much.

    What was measured while the machine did something else is put right by steps, or forgotten. More tokens cost no less, and at
    the start they are taken to cost no more than in as many more steps.

    Args:
        measured: (tokens, seconds); where nothing was measured, any number of tokens up to 64 is said to cost the same.
    """

    def __init__(self, measured: Iterable[tuple[int, float]] = ()):
        points = sorted(measured) or [(1, 1.0), (64, 1.0)]
        self.sizes = [size for size, _ in points]
        self._seconds = [seconds for _, seconds in points]
        self._taken = [0] * len(points)  # steps of about each size
        for place in range(1, len(points)):
            most = self._seconds[place - 1] * self.sizes[place] / self.sizes[place - 1]
            self._seconds[place] = min(self._seconds[place], most)

    @property
    def curve(self) -> tuple[tuple[int, float], ...]:
        """(tokens, seconds), as known by now: more tokens never cost less."""
        return tuple((size, self.seconds(size)) for size in self.sizes)

    def seconds(self, num_tokens: int) -> float:
        """What a step of so many tokens is expected to take."""
        return sum(weight * max(self._seconds[: place + 1]) for place, weight in self._around(num_tokens))

    def record(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long: what is known of the next larger size that was measured moves by as much."""
        if num_tokens > self.sizes[-1]:
            return
        expected, place = self.seconds(num_tokens), bisect_left(self.sizes, num_tokens)
        took = min(max(seconds, expected / MOST_OFF), expected * MOST_OFF)
        learned = max(self._seconds[: place + 1]) + LEARNING_RATE * (took - expected)
        self._seconds[: place + 1] = [*(min(other, learned) for other in self._seconds[:place]), learned]
        self._taken[place] += 1
        for larger in range(place + 1, len(self._seconds)):
            hope = max(MOST_HOPE / (1 + self._taken[larger]), LEAST_HOPE)
            self._seconds[larger] += hope * min(expected - self._seconds[larger], 0.0)

    def _around(self, num_tokens: int) -> list[tuple[int, float]]:
        """Which measured sizes a number is between, and how much each counts."""
        sizes, last = self.sizes, len(self.sizes) - 1
        if num_tokens >= sizes[last]:
            return [(last, num_tokens / sizes[last])]
        after = bisect_left(sizes, num_tokens)
        if after == 0 or sizes[after] == num_tokens:
            return [(after, 1.0)]
        share = (num_tokens - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        return [(after - 1, 1 - share), (after, share)]
