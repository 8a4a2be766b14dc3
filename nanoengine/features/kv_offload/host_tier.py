"""HostTier: an index of the blocks that have a copy in host memory, and of their slots. The runner has the K/V itself."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

BlockKey = tuple[int, bytes]
"""A KV group, and the hash of a prefix."""


@dataclass(slots=True, eq=False)
class HostBlock:
    """One block in host memory."""

    slot: int
    tokens: bytes  # of the block
    depth: int  # blocks of its prefix
    is_copied: bool = False  # the step that copies it was committed


class HostTier:
    """Slots of one block each, evicted in the order of their last use.

    An entry can be loaded as soon as its copy is ordered, since copies are made in the order of the plans. It can be evicted when
    the step of its copy was committed.

    Args:
        num_slots: capacity in blocks; 0: no host memory.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.free_slots = list(range(num_slots))[::-1]
        self.entries: OrderedDict[BlockKey, HostBlock] = OrderedDict()
        self.held: set[BlockKey] = set()  # loaded by the plan that is being made: not evicted

    def has(self, key: BlockKey, tokens: bytes) -> bool:
        entry = self.entries.get(key)
        return entry is not None and entry.tokens == tokens

    def put(self, key: BlockKey, tokens: bytes, depth: int) -> HostBlock:
        """Allocate a free slot for a block."""
        entry = self.entries[key] = HostBlock(self.free_slots.pop(), tokens, depth)
        return entry

    def use(self, key: BlockKey) -> None:
        """The block was hit: it is evicted last."""
        self.entries.move_to_end(key)

    def oldest(self) -> BlockKey | None:
        """The block that is evicted next; None if none may be."""
        entries = self.entries.items()
        return next((key for key, entry in entries if entry.is_copied and key not in self.held), None)

    def drop(self, key: BlockKey) -> None:
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.free_slots.append(entry.slot)

    def clear(self) -> None:
        for key in list(self.entries):
            self.drop(key)
