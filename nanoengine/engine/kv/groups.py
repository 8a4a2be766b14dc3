"""KV groups: layers that remember alike share block tables, and every group's blocks come from the one pool.

A layer's spec says which earlier tokens it sees. Layers of equal spec form groups of equally many layers, so that a block has the
same bytes in every group; where a number does not divide, the last group of a spec has fewer layers, and its blocks are padded.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

FULL, WINDOW, CHUNKED, ENCODER = KINDS = ("full", "window", "chunked", "encoder")


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Which tokens a layer sees.

    Args:
        kind: "full": all up to the token itself. "window": the last `size` of these. "chunked": those from the last multiple of
            `size` on (Llama 4's local attention). "encoder": all of an encoder's output (cross attention), which is written once.
        size: tokens of a window or a chunk.
    """

    kind: str = FULL
    size: int = 0

    def __post_init__(self) -> None:
        assert self.kind in KINDS
        assert (self.size > 0) == (self.kind in (WINDOW, CHUNKED))

    @property
    def forgets(self) -> bool:
        """Whether there are tokens that later ones do not see."""
        return self.size > 0

    def first_seen(self, position: int) -> int:
        """The first token that the token at a position sees; no later one sees any before it."""
        if self.kind == WINDOW:
            return max(position - self.size + 1, 0)
        return position - position % self.size if self.kind == CHUNKED else 0

    def most_blocks(self, num_tokens: int, block_size: int, most_new: int) -> int:
        """Most blocks that a sequence has at once, on its way to so many tokens.

        Args:
            most_new: most of its tokens in one step.
        """
        if self.kind == ENCODER:
            return 0  # its own number, which does not grow
        most = -(-num_tokens // block_size)
        if not self.forgets:
            return most
        seen = self.size - 1 + most_new  # tokens of a step, and those that its first one sees before it
        return min(most, -(-(seen - 1) // block_size) + 1)  # a block more where they begin in the middle of one

    def __str__(self) -> str:
        return f"{self.kind} {self.size}" if self.forgets else self.kind


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose K/V lie in the same blocks."""

    spec: KVSpec
    layers: tuple[int, ...]


def group_layers(specs: Sequence[KVSpec]) -> list[KVGroup]:
    """Put layers of equal spec into groups, each of as many layers as the rarest spec has, or fewer."""
    of_spec: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        of_spec.setdefault(spec, []).append(layer)
    size = min(map(len, of_spec.values()))
    return [
        KVGroup(spec, tuple(layers[first : first + size]))
        for spec, layers in of_spec.items()
        for first in range(0, len(layers), size)
    ]


class Demand(NamedTuple):
    """What sequences of some groups take of a pool."""

    specs: tuple[KVSpec, ...]
    block_size: int
    most_new: int  # tokens of a sequence in one step

    def blocks(self, num_tokens: int) -> int:
        """Most blocks of all groups that one sequence has at once, on its way to so many tokens."""
        return sum(spec.most_blocks(num_tokens, self.block_size, self.most_new) for spec in self.specs)

    def longest(self, num_blocks: int, limit: int) -> int:
        """Tokens of the longest sequence that fits into so many blocks, `limit` at most."""
        return bisect(range(1, limit + 1), num_blocks, key=self.blocks)
