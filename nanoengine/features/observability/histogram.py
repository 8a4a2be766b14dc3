"""Histograms, with vLLM's bounds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from itertools import accumulate

# Values and bounds are of one type, seconds floats and tokens whole numbers: bisect compares those faster.
LATENCY_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_COMPLETIONS_BOUNDS = (1, 2, 5, 10, 20)
NUM_PREEMPTIONS_BOUNDS = (1, 2, 3, 4, 5, 10, 20)


def length_bounds(max_model_len: int) -> tuple[int, ...]:
    """Bounds 1, 2, 5, 10, 20, 50 and so on, up to the longest sequence in tokens."""
    scales = (10**exponent for exponent in range(len(str(max_model_len))))
    return tuple(digit * scale for scale in scales for digit in (1, 2, 5) if digit * scale <= max_model_len)


class Histogram:
    """Counts of values by buckets, and the sum of the values.

    Args:
        bounds: ascending. A bucket counts the values above the previous bound, up to its bound; one more bucket counts the rest.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Seq[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def __add__(self, other: Histogram) -> Histogram:
        """The values of both, whose bounds are the same."""
        total = Histogram(self.bounds)
        total.counts = [one + two for one, two in zip(self.counts, other.counts, strict=True)]
        total.sum = self.sum + other.sum
        return total

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[int]:
        """The number of values up to each bound; at last, that of all values."""
        return list(accumulate(self.counts))
