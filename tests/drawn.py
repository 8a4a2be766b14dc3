"""How tests draw their cases: with Hypothesis, or from numbered seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hypothesis import HealthCheck, settings

FAST = settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


def check_seeds(check: Callable[[int], object], seeds: Iterable[int]) -> None:
    """Draw and check a case from each seed; the error of one that fails names it."""
    for seed in seeds:
        try:
            check(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
