"""Offload: the policy of the lower tiers. Blocks evicted from the pool go to host memory first, then to files.

A block that is evicted from the pool is copied down under its prefix. A look-up that misses in the pool goes on here, and a hit
is copied back. The copies are added to the plan that is being made. A block that a step copies down can be loaded by the same
step and later ones; if the step fails, the copy counts as not made.

Swapping is the same: the blocks of a preempted sequence stay in the prefix cache, go to host memory when they are evicted, and
are hits when the sequence resumes.

Snapshots of states are offloaded in pieces: each piece is a block of a separate KV group.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from nanoengine.core.messages import StepResult
from nanoengine.core.scheduler import Step
from nanoengine.core.seams import KVStore, PolicyPart
from nanoengine.core.sequence import Sequence
from nanoengine.features.kv_offload.disk_index import DiskIndex
from nanoengine.features.kv_offload.host_tier import BlockKey, HostBlock, HostTier
from nanoengine.features.kv_offload.messages import KV_OFFLOAD, Copy, Location, OffloadOrders, Tier
from nanoengine.features.statistics import Statistics, metric

moved = partial(metric, "nanoengine:kv_blocks_moved", "Blocks of K/V copied between tiers.")


@dataclass(slots=True)
class OffloadStats(Statistics):
    """Counts since the start."""

    num_saved_blocks: int = moved(labels={"way": "device_to_host"})
    num_loaded_blocks: int = moved(labels={"way": "host_to_device"})
    num_loaded_files: int = moved(labels={"way": "from_disk"})  # to the pool
    num_written_files: int = moved(labels={"way": "to_disk"})
    num_bad_files: int = metric("nanoengine:kv_file_errors", "Files that could not be read.")


class InPool(NamedTuple):
    """A cached block of the pool."""

    block: int
    tokens: bytes
    depth: int  # blocks of its prefix


class Offload(KVStore, PolicyPart):
    """The index of blocks outside the pool, and the copies to make.

    Args:
        disk: None: no files.
        num_groups: KV groups.
        num_pieces: of a snapshot of states; 0: there are none.
    """

    def __init__(self, host: HostTier, disk: DiskIndex | None, num_groups: int, num_pieces: int = 0):
        self.host, self.disk = host, disk
        self.groups, self.state_groups = range(num_groups), range(num_groups, num_groups + num_pieces)
        self.stats = OffloadStats()
        self.orders = OffloadOrders()  # of the plan that is being made
        self.in_pool: dict[BlockKey, InPool] = {}
        self._saved: list[tuple[BlockKey, HostBlock]] = []  # to host memory, by the plan that is being made
        self._in_flight: dict[int, tuple[OffloadOrders, list[tuple[BlockKey, HostBlock]]]] = {}  # by number of the step

    # ---- KVStore

    def cached(self, group: int, hash: bytes, parent: bytes, tokens: bytes, block: int) -> None:
        depth = self._depth((0, hash)) if group in self.state_groups else self._depth((group, parent)) + 1
        self.in_pool[group, hash] = InPool(block, tokens, depth)

    def evicted(self, group: int, hash: bytes, tokens: bytes, block: int) -> None:
        key, source = (group, hash), self._location(group, block)
        cached = self.in_pool.pop(key, None)
        depth = self._depth((0, hash)) if cached is None else cached.depth  # None: a snapshot that was not to stay
        if self.host.has(key, tokens):
            self.host.use(key)
        elif self._has_slot():
            entry = self.host.put(key, tokens, depth)
            self._saved.append((key, entry))
            self.orders.copies.append(Copy(source, Location(Tier.HOST, entry.slot)))
            self.stats.num_saved_blocks += 1
        elif self.disk is not None:
            self.disk.save(self.orders, key, tokens, source)

    def invalidated(self, group: int, hash: bytes, tokens: bytes) -> None:
        key = group, hash
        self.in_pool.pop(key, None)
        self.host.drop(key)
        if self.disk is not None:
            self.disk.invalidate(self.orders, key)

    def has(self, group: int, hash: bytes, tokens: bytes) -> bool:
        key = group, hash
        return self.host.has(key, tokens) or (self.disk is not None and self.disk.has(key, tokens))

    def hold(self, blocks: Seq[tuple[bytes, bytes]]) -> None:
        if not blocks or not self.host.entries:
            return
        wanted = [(group, block) for group in self.groups for block in blocks]
        wanted += [(group, blocks[-1]) for group in self.state_groups]
        for group, (hash, tokens) in wanted:
            if (key := (group, hash)) not in self.in_pool and self.host.has(key, tokens):
                self.host.held.add(key)
                self.host.use(key)

    def load(self, group: int, hash: bytes, tokens: bytes, block: int) -> None:
        key, target = (group, hash), self._location(group, block)
        if self.host.has(key, tokens):
            self.orders.copies.append(Copy(Location(Tier.HOST, self.host.entries[key].slot), target))
            self.stats.num_loaded_blocks += 1
        else:
            assert self.disk is not None
            self.orders.copies.append(Copy(Location(Tier.FILE, self.disk.name(key)), target))
            self.stats.num_loaded_files += 1

    def clear(self) -> None:
        self.in_pool.clear()
        self.host.clear()
        if self.disk is not None:
            self.disk.clear(self.orders)

    def closing(self) -> None:
        """Order writes of all cached blocks. Where memory is short, the beginnings of prefixes are written, and written last: the
        oldest files are deleted first.
        """
        if self.disk is None:
            return
        self.orders.is_last = True
        cached = [
            (each.depth, key, each.tokens, self._location(key[0], each.block)) for key, each in self.in_pool.items()
        ]
        for key, entry in self.host.entries.items():
            if entry.is_copied and key not in self.in_pool:
                cached.append((entry.depth, key, entry.tokens, Location(Tier.HOST, entry.slot)))
        for _, key, tokens, source in sorted(cached, reverse=True):
            self.disk.save(self.orders, key, tokens, source)

    def _location(self, group: int, block: int) -> Location:
        return Location(Tier.STATES if group in self.state_groups else Tier.POOL, block)

    def _depth(self, key: BlockKey) -> int:
        entry = self.in_pool.get(key) or self.host.entries.get(key)
        return 0 if entry is None else entry.depth

    def _has_slot(self) -> bool:
        """Whether there is a free slot of host memory; the oldest entry is evicted for it, to a file."""
        host = self.host
        if not host.free_slots and (key := host.oldest()) is not None:
            entry = host.entries[key]
            if self.disk is not None and key not in self.in_pool:  # the pool evicts it later
                self.disk.save(self.orders, key, entry.tokens, Location(Tier.HOST, entry.slot))
            host.drop(key)
        return bool(host.free_slots)

    # ---- PolicyPart

    def wants_step(self) -> bool:
        """A step is needed for orders, or for outcomes that a sequence waits for, unless one is in flight."""
        awaits = self.disk is not None and bool(self.disk.reading)
        return not self._in_flight and (bool(self.orders) or awaits)

    def complete(self, step: Step) -> None:
        orders, self.orders = self.orders, OffloadOrders()
        self.host.held.clear()
        saved, self._saved = self._saved, []
        orders.waits = not step.decodes and not step.runs
        if self.disk is not None and orders.wanted is not None:
            orders.wanted = list(self.disk.wanted)
        self._in_flight[step.number] = orders, saved
        step.plan.extras[KV_OFFLOAD] = orders

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        orders, saved = self._in_flight.pop(step.number)
        has_failed = step.is_dropped or isinstance(result, BaseException)
        if not has_failed:
            for _, entry in saved:
                entry.is_copied = True
        elif not step.is_dropped:  # with it, all steps in flight are dropped: the next one must not load their copies
            for key, entry in [*saved, *(pair for _, others in self._in_flight.values() for pair in others)]:
                if self.host.entries.get(key) is entry:
                    self.host.drop(key)
        if self.disk is None:
            return
        if not isinstance(result, BaseException):
            for answer in result.extras.get(KV_OFFLOAD, ()):
                self.disk.answer(answer)
                self.stats.num_bad_files += answer.kind == "read" and answer.problem is not None
                self.stats.num_written_files += answer.kind == "written" and answer.problem is None
        if has_failed:
            self.disk.step_failed(orders, self.orders)
