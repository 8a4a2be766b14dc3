"""Spans of time."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]
"""From when to when."""


def merge(spans: Iterable[Span]) -> list[Span]:
    """The spans that cover the same points, ascending and apart from each other."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
