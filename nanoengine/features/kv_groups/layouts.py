"""KV groups: layers of one visible range have one block table, and the blocks of all groups come from one pool.

Groups have equally many layers, so that a block has the same bytes in each of them. Where a number does not divide, the last
group of a kind has fewer layers, and its blocks are padded.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from nanoengine.core.seams import KVLayout


@dataclass(frozen=True, slots=True)
class WindowLayout(KVLayout):
    """The layout of layers with a sliding window or with chunks. See `KVLayout`.

    Args:
        size: tokens of the window: a token attends to the last `size` tokens, itself included.
        most_new: most tokens of a sequence in one step.
        chunked: windows begin at multiples of the size: a token attends to the tokens of its chunk, up to itself.
    """

    size: int
    most_new: int
    chunked: bool = False
    forgets = True

    def first_visible(self, position: int) -> int:
        return position - position % self.size if self.chunked else max(position - self.size + 1, 0)

    def reserve(self, start: int, num_tokens: int) -> int:
        """Slots for a window and the tokens of one step. Later steps use the blocks that leave the window."""
        return min(num_tokens, self.first_visible(start) + self.size + self.most_new)


class KVGroup(NamedTuple):
    """Layers whose K/V lie in the same blocks."""

    window: int | None  # tokens that a token attends to, itself included; None: all before it
    layers: list[int]
    chunked: bool = False  # whether windows begin at multiples of their size

    @property
    def visible_range(self) -> str:
        """For messages."""
        kind = "chunks" if self.chunked else "a window"
        return "all tokens" if self.window is None else f"{kind} of {self.window}"

    def layout(self, most_new: int) -> KVLayout:
        return KVLayout() if self.window is None else WindowLayout(self.window, most_new, self.chunked)


def group_layers(windows: Seq[int | None], *, chunked: bool = False) -> list[KVGroup]:
    """Groups of layers of equal window, each of as many layers as the rarest window has, or fewer.

    Args:
        windows: of each layer.
        chunked: see `WindowLayout`.
    """
    of_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        of_window.setdefault(window, []).append(layer)
    size = min(map(len, of_window.values()))
    return [
        KVGroup(window, layers[first : first + size], chunked)
        for window, layers in of_window.items()
        for first in range(0, len(layers), size)
    ]


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """The most blocks of one sequence at a time, in all groups. In a pool of so many blocks, the first running sequence always
    goes on.

    Args:
        groups: all groups of the pool.
        block_size: tokens of a block.
        most_new: most tokens of a sequence in one step.
        depth: most steps in flight, 1 or 2.
    """

    groups: Seq[KVGroup]
    block_size: int
    most_new: int
    depth: int = 1

    def num_blocks(self, num_tokens: int) -> int:
        """For a sequence that grows to so many tokens."""
        return sum(self._of_group(group, num_tokens) for group in self.groups)

    def _of_group(self, group: KVGroup, num_tokens: int) -> int:
        """In a window: blocks of the new tokens of a step and of all tokens that the first of them attends to. A decode holds a
        block until the step that filled it is committed; by then `depth` - 1 more tokens may be scheduled. A chunk without free
        blocks waits for that.
        """
        size = self.block_size
        all_blocks = -(-num_tokens // size)
        if group.window is None:
            return all_blocks
        uncommitted = -(-(self.depth - 1) // size) * size
        new = max(self.most_new, uncommitted + 1)
        return min(all_blocks, -(-(group.window + new - 1) // size) + 1)  # they may begin in the middle of a block
