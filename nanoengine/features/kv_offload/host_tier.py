"""HostTier: which blocks have a copy in host memory, and in which slot. The K/V itself is the runner's."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

Key = tuple[int, bytes]
"""A KV group, and the hash of a prefix."""


@dataclass(slots=True, eq=False)
class Entry:
    """One block in host memory."""

    slot: int
    tokens: bytes  # of the block
    depth: int  # blocks of its prefix
    is_copied: bool = False  # the step that copies it was committed


class HostTier:
    """Slots of one block each, least recently used first.

    An entry can be loaded as soon as its copy is ordered, since copies are made in the order of the plans. It can be pushed
    out when its copy is made for certain.

    Args:
        num_slots: how many blocks there is memory for; 0: no host memory.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.free_slots = list(range(num_slots))[::-1]
        self.entries: OrderedDict[Key, Entry] = OrderedDict()
        self.held: set[Key] = set()  # loaded by the plan that is being made: nobody pushes them out

    def has(self, key: Key, tokens: bytes) -> bool:
        entry = self.entries.get(key)
        return entry is not None and entry.tokens == tokens

    def put(self, key: Key, tokens: bytes, depth: int) -> Entry:
        """Give a block a free slot."""
        entry = self.entries[key] = Entry(self.free_slots.pop(), tokens, depth)
        return entry

    def use(self, key: Key) -> None:
        """It was hit: it is pushed out last."""
        self.entries.move_to_end(key)

    def oldest(self) -> Key | None:
        """The one to be pushed out next; None if none may be."""
        entries = self.entries.items()
        return next((key for key, entry in entries if entry.is_copied and key not in self.held), None)

    def drop(self, key: Key) -> None:
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.free_slots.append(entry.slot)

    def clear(self) -> None:
        for key in list(self.entries):
            self.drop(key)
