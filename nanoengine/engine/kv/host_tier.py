"""HostTier: which prefixes have a copy in host memory, of which group and in which slot. The K/V itself is the runner's."""

from __future__ import annotations

from collections import OrderedDict

from nanoengine.engine.kv.block_pool import PrefixKV


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
        self.entries: OrderedDict[int, PrefixKV] = OrderedDict()  # slot -> what it holds
        self.pins = [0] * num_slots
        self._num_pinned = 0

    @property
    def num_available(self) -> int:
        """Slots that are free or can be made free."""
        return self.num_slots - self._num_pinned

    def put(self, slot: int, kv: PrefixKV, *, filled: bool) -> None:
        """Give a prefix a slot that was taken from `free_slots`; `filled` if its K/V is there already."""
        assert kv.host_slot is None
        assert slot not in self.entries
        self.entries[slot] = kv
        kv.host_slot = slot
        kv.host_filled = filled

    def use(self, kv: PrefixKV) -> None:
        """A prefix was hit: it goes to the end of the line."""
        assert kv.host_slot is not None
        self.entries.move_to_end(kv.host_slot)

    def oldest(self) -> PrefixKV | None:
        """The one to go next; None if all are pinned."""
        pins = self.pins
        return next((kv for slot, kv in self.entries.items() if not pins[slot]), None)

    def drop(self, kv: PrefixKV) -> None:
        """Take the slot of a prefix back. If it is pinned, it is free when it no longer is."""
        slot = kv.host_slot
        assert slot is not None
        del self.entries[slot]
        kv.host_slot = None
        kv.host_filled = False
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
        for kv in list(self.entries.values()):
            self.drop(kv)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert self._num_pinned == sum(count > 0 for count in self.pins)
        nobodys = [slot for slot, count in enumerate(self.pins) if count and slot not in self.entries]
        assert sorted([*self.free_slots, *self.entries, *nobodys]) == list(range(self.num_slots))
        assert all(kv.host_slot == slot for slot, kv in self.entries.items())
        assert all(kv.host_filled or self.pins[slot] for slot, kv in self.entries.items())
