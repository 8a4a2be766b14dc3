"""CacheStats: how much of what was asked for the prefix cache had."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from nanoengine.engine.messages import Tier

WINDOW = 1000
"""Requests over which `recent_hit_rate` looks back."""


@dataclass(slots=True)
class GroupStats:
    """Blocks and files of one KV group."""

    num_hit_blocks: int = 0
    num_forgotten_blocks: int = 0  # given back by sequences that go on: no later token sees them
    num_evicted_blocks: int = 0  # prefixes whose last block in the pool was taken; a lower tier may have kept them
    num_copied_blocks: int = 0  # copies on write
    num_saved_blocks: int = 0  # from the pool to host memory
    num_loaded_blocks: int = 0  # and back
    num_written_files: int = 0  # files ordered to be written, and to be read
    num_read_files: int = 0


@dataclass(slots=True)
class CacheStats:
    """Tokens looked up and found. A request counts once, when it is first admitted; when it resumes, it counts apart.

    One that does not look, because caching is off or it must compute all of its prompt, does not count.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_resumed_queried_tokens: int = 0
    num_resumed_hit_tokens: int = 0
    hits_by_tier: dict[Tier, int] = field(
        default_factory=lambda: dict.fromkeys(Tier, 0)
    )  # tokens, by the lowest tier that any group had them in, the highest where none needs them
    groups: list[GroupStats] = field(default_factory=lambda: [GroupStats()])
    num_bad_files: int = 0  # reads and writes that failed
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

    # ---- of all groups together; a block that sequences give back for good is not evicted

    @property
    def num_evicted_blocks(self) -> int:
        return sum(group.num_evicted_blocks for group in self.groups)

    @property
    def num_copied_blocks(self) -> int:
        return sum(group.num_copied_blocks for group in self.groups)

    @property
    def num_saved_blocks(self) -> int:
        return sum(group.num_saved_blocks for group in self.groups)

    @property
    def num_loaded_blocks(self) -> int:
        return sum(group.num_loaded_blocks for group in self.groups)

    @property
    def num_written_files(self) -> int:
        return sum(group.num_written_files for group in self.groups)

    @property
    def num_read_files(self) -> int:
        return sum(group.num_read_files for group in self.groups)
