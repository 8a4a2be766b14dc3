"""CacheStats: how many of the tokens that were looked up the prefix cache had."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW = 1000
"""Requests over which `recent_hit_rate` looks back."""


@dataclass(slots=True)
class CacheStats:
    """Tokens looked up and found. A request counts once, when it is first admitted; when it resumes, it counts apart.

    A request that does not look, because caching is off or because all of its prompt must be computed, does not count.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_resumed_queried_tokens: int = 0
    num_resumed_hit_tokens: int = 0
    num_evicted_blocks: int = 0  # cached blocks of the pool that were taken for others; a lower tier may have kept them
    _recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW), repr=False)

    def record(self, num_queried: int, num_hit: int, *, resumed: bool) -> None:
        if resumed:
            self.num_resumed_queried_tokens += num_queried
            self.num_resumed_hit_tokens += num_hit
        else:
            self.num_queried_tokens += num_queried
            self.num_hit_tokens += num_hit
            self._recent.append((num_queried, num_hit))

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens of all requests that the cache had; None if nobody has asked."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else None

    @property
    def recent_hit_rate(self) -> float | None:
        """The same over the last `WINDOW` requests."""
        queried = sum(pair[0] for pair in self._recent)
        return sum(pair[1] for pair in self._recent) / queried if queried else None
