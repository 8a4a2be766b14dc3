"""KV groups: layers that see the same tokens share block tables, and the blocks of every group come from one pool.

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
    """The layout of layers in which a token sees the last `size` tokens, itself among them. See `KVLayout`.

    Args:
        size: tokens of the window.
        most_new: most tokens of a sequence in one step.
        chunked: windows stand still, and begin at multiples of the size: a token sees those of its own, up to itself.
    """

    size: int
    most_new: int
    chunked: bool = False
    forgets = True

    def first_seen(self, position: int) -> int:
        return position - position % self.size if self.chunked else max(position - self.size + 1, 0)

    def reserve(self, start: int, num_tokens: int) -> int:
        """Room for a window and the tokens of one step. Later steps live from the blocks that leave the window."""
        return min(num_tokens, self.first_seen(start) + self.size + self.most_new)


class KVGroup(NamedTuple):
    """Layers whose K/V lie in the same blocks."""

    window: int | None  # tokens that a token sees, itself among them; None: all before it
    layers: list[int]
    chunked: bool = False  # whether windows stand still

    @property
    def visible_range(self) -> str:
        """For messages."""
        kind = "chunks" if self.chunked else "a window"
        return "all tokens" if self.window is None else f"{kind} of {self.window}"

    def layout(self, most_new: int) -> KVLayout:
        return KVLayout() if self.window is None else WindowLayout(self.window, most_new, self.chunked)


def group_layers(windows: Seq[int | None], *, chunked: bool = False) -> list[KVGroup]:
    """Put layers of equal window into groups, each of as many layers as the rarest window has, or fewer.

    Args:
        windows: of each layer.
        chunked: whether they stand still.
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
class Need:
    """How many blocks one sequence may have at once, in all groups together. A pool of so many always lets the first of the
    running sequences go on.

    Args:
        groups: that take blocks from the pool.
        block_size: tokens of a block.
        most_new: most tokens of a sequence in one step.
        depth: most steps in flight.
    """

    groups: Seq[KVGroup]
    block_size: int
    most_new: int
    depth: int = 1

    def num_blocks(self, num_tokens: int) -> int:
        """Of a sequence on its way to so many tokens."""
        return sum(self._of_group(group, num_tokens) for group in self.groups)

    def _of_group(self, group: KVGroup, num_tokens: int) -> int:
        """In a window: blocks of the new tokens of a step and of all tokens that the first of them sees. A decode keeps a block
        until the step that filled it is committed; by then `depth` - 1 more tokens may be scheduled. A chunk that finds no
        room waits for that.
        """
        size = self.block_size
        all_blocks = -(-num_tokens // size)
        if group.window is None:
            return all_blocks
        uncommitted = -(-(self.depth - 1) // size) * size
        new = max(self.most_new, uncommitted + 1)
        return min(all_blocks, -(-(group.window + new - 1) // size) + 1)  # they may begin in the middle of a block
