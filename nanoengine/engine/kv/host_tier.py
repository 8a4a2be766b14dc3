"""HostTier: which prefixes have a copy in host memory, in which slot. The K/V itself is the runner's."""

from __future__ import annotations

from collections import OrderedDict

from nanoengine.engine.kv.block_pool import Prefix


class HostTier:
    """A fixed number of slots of one block each, least recently used first.

    A pinned slot is somebody's business: of a plan whose copies touch it, until that is committed, or of a file that is read
    into it. Nobody else gets it, and what it holds is not pushed out.

    Args:
        num_slots: how many blocks host memory holds. Files all come through here: with a disk tier there must be one at least. To
            read a prompt back as a whole, there must be as many as the longest sequence has blocks.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.entries: OrderedDict[int, Prefix] = OrderedDict()  # slot -> what it holds
        self.pins = [0] * num_slots
        self._num_pinned = 0

    @property
    def num_available(self) -> int:
        """Slots that are free or can be made free."""
        return self.num_slots - self._num_pinned

    def put(self, slot: int, prefix: Prefix, *, filled: bool) -> None:
        """Give a prefix a slot that was taken from `free_slots`; `filled` if its K/V is there already."""
        assert prefix.host_slot is None
        assert slot not in self.entries
        self.entries[slot] = prefix
        prefix.host_slot = slot
        prefix.host_filled = filled

    def use(self, prefix: Prefix) -> None:
        """A prefix was hit: it goes to the end of the line."""
        assert prefix.host_slot is not None
        self.entries.move_to_end(prefix.host_slot)

    def oldest(self) -> Prefix | None:
        """The one to go next; None if all are pinned."""
        pins = self.pins
        return next((prefix for slot, prefix in self.entries.items() if not pins[slot]), None)

    def drop(self, prefix: Prefix) -> None:
        """Take the slot of a prefix back. If it is pinned, it is free when it no longer is."""
        slot = prefix.host_slot
        assert slot is not None
        del self.entries[slot]
        prefix.host_slot = None
        prefix.host_filled = False
        if not self.pins[slot]:
            self.free_slots.append(slot)

    def pin(self, slot: int) -> None:
        self._num_pinned += not self.pins[slot]
        self.pins[slot] += 1

    def unpin(self, slot: int) -> None:
        self.pins[slot] -= 1
        assert self.pins[slot] >= 0
        if not self.pins[slot]:
            self._num_pinned -= 1
            if slot not in self.entries:
                self.free_slots.append(slot)

    def clear(self) -> None:
        for prefix in list(self.entries.values()):
            self.drop(prefix)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert self._num_pinned == sum(count > 0 for count in self.pins)
        nobodys = [slot for slot, count in enumerate(self.pins) if count and slot not in self.entries]
        assert sorted([*self.free_slots, *self.entries, *nobodys]) == list(range(self.num_slots))
        assert all(prefix.host_slot == slot for slot, prefix in self.entries.items())
        assert all(prefix.host_filled or self.pins[slot] for slot, prefix in self.entries.items())
