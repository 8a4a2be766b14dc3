"""KV groups: layers that remember alike share block tables, and every group's blocks come from the one pool.

A layer's spec says which earlier tokens it sees. Layers of equal spec form groups of equally many layers, so that a block has the
same bytes in every group; where a number does not divide, the last group of a spec has fewer layers, and its blocks are padded.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Groups:
    """What the block manager knows of groups: of which blocks a sequence needs at a time.

    Args:
        specs: of each group.
        block_size: tokens per block.
        most_new: most tokens of a sequence in one step.
    """

    specs: tuple[KVSpec, ...] = (KVSpec(),)
    block_size: int = 16
    most_new: int = 1

    def __len__(self) -> int:
        return len(self.specs)

    @property
    def forget(self) -> bool:
        """Whether any group gives blocks back before a sequence ends."""
        return any(spec.forgets for spec in self.specs)

    def first_block(self, group: int, position: int) -> int:
        """The first block with anything that the token at a position sees."""
        return self.specs[group].first_seen(position) // self.block_size

    def most_blocks(self, group: int, num_tokens: int) -> int:
        """Most blocks that a sequence has of a group at once, on its way to so many tokens.

        In a window: those that the tokens of a step are in, the one behind them, and all that the first of them sees.
        """
        spec = self.specs[group]
        if spec.kind == ENCODER:
            return 0  # as many as the encoder has tokens for; they do not become more
        most = -(-num_tokens // self.block_size)
        if not spec.forgets:
            return most
        return min(
            most, -(-(spec.size + self.most_new - 1) // self.block_size) + 1
        )  # they may begin in the middle of one

    def blocks_at_once(self, num_tokens: int) -> int:
        """The same for all groups together."""
        return sum(self.most_blocks(group, num_tokens) for group in range(len(self.specs)))

    def longest(self, num_blocks: int, limit: int) -> int:
        """Tokens of the longest sequence that so many blocks are enough for, at most `limit`."""
        return bisect(range(1, limit + 1), num_blocks, key=self.blocks_at_once)

    def longest_hit(self, count: int, has: Callable[[int, int], bool]) -> int:
        """The most leading blocks of a sequence behind which every group has what the next token sees.

        Each group goes back from the end as far as it must see. Where it finds a hole, the hit ends before that, for all groups:
        they go on from there until none finds one. No block is looked at twice.

        Args:
            count: what groups that forget nothing have.
            has: whether a group that forgets has a block, called with both numbers.
        """
        forgetting = [group for group, spec in enumerate(self.specs) if spec.forgets]
        begin = dict.fromkeys(forgetting, count)  # of what each is known to have, up to the end
        end, is_settled = count, False
        while not is_settled:
            is_settled = True
            for group in forgetting:
                begin[group] = min(begin[group], end)
                while begin[group] > self.first_block(group, end * self.block_size):
                    begin[group] -= 1
                    if not has(group, begin[group]):
                        end, is_settled = begin[group], False
        return end
