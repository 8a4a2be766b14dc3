"""HostTier: which prefixes have a copy in host memory, in which slot. The K/V itself is the runner's."""

from __future__ import annotations

from collections import OrderedDict

from nanoengine.engine.kv.block_pool import Prefix


class HostTier:
    """A fixed number of slots of one block each, least recently used first.

    Args:
        num_slots: how many blocks host memory holds.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.entries: OrderedDict[int, Prefix] = OrderedDict()  # slot -> what it holds

    @property
    def has_room(self) -> bool:
        return bool(self.free_slots)

    def put(self, prefix: Prefix) -> int:
        """Give a prefix a slot; the caller sees to it that there is one."""
        assert prefix.host_slot is None
        slot = self.free_slots.pop()
        self.entries[slot] = prefix
        prefix.host_slot = slot
        return slot

    def use(self, prefix: Prefix) -> None:
        """A prefix was hit: it goes to the end of the line."""
        assert prefix.host_slot is not None
        self.entries.move_to_end(prefix.host_slot)

    def oldest(self) -> Prefix | None:
        """The one to go next."""
        return next(iter(self.entries.values()), None)

    def drop(self, prefix: Prefix) -> None:
        """Take the slot of a prefix back."""
        assert prefix.host_slot is not None
        del self.entries[prefix.host_slot]
        self.free_slots.append(prefix.host_slot)
        prefix.host_slot = None

    def clear(self) -> None:
        for prefix in list(self.entries.values()):
            self.drop(prefix)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert sorted([*self.free_slots, *self.entries]) == list(range(self.num_slots))
        assert all(prefix.host_slot == slot for slot, prefix in self.entries.items())
