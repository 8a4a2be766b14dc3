"""LowerTiers: what becomes of blocks that the pool has no room for. Host memory first, then files.

A block that is about to be lost is copied down under its prefix; a look-up that misses in the pool goes on here, and a hit is
copied back. The copies are orders of the plan that is being made, in the order in which they must happen. What a plan copies down
counts when that plan is committed, and only what is committed itself is copied.
"""

from __future__ import annotations

from nanoengine.engine.kv.block_pool import BlockPool, Prefix, PrefixKV
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.kv.orders import PlanRecord
from nanoengine.engine.kv.statistics import CacheStats
from nanoengine.engine.messages import Place, Tier, Transfer


class LowerTiers:
    """Either tier may be missing; without both, what the pool evicts is gone.

    Args:
        pool: the tier above.
        host: slots in host memory; without any there can be no files.
        disk: an index of files.
        stats: told of what is moved.
    """

    def __init__(self, pool: BlockPool, host: HostTier | None, disk: DiskTier | None, stats: CacheStats):
        assert host is not None or disk is None, "files come through host memory: a disk tier needs a host tier"
        self.pool = pool
        self.host = host
        self.disk = disk
        self.stats = stats

    # ---- down

    def evict(self, plan: PlanRecord, going: list[int]) -> None:
        """Empty some blocks that the pool must give away, the one that is worth least first. What only they hold, goes down.

        If host memory has no room for all of it, what is worth most gets that.
        """
        pool, host = self.pool, self.host
        last: list[tuple[int, PrefixKV]] = []  # copies
        for block in going:
            kv = pool.contents[block]
            assert kv is not None
            is_last = len(kv.blocks) == 1
            self.stats.groups[kv.group].num_evicted_blocks += is_last
            if is_last and host is not None:
                last.append((block, kv))
            else:
                pool.withdraw(block)
        if host is None or not last:
            return
        num_lost = max(len(last) - host.num_available, 0)
        for block, kv in last[:num_lost]:
            if kv.host_slot is None and block not in pool.uncommitted:
                self._write(plan, kv, Place(Tier.DEVICE, block))
            pool.withdraw(block)
        del last[:num_lost]
        self._use_in_host([kv for _, kv in last])  # they must not make room for each other
        for block, kv in last:
            self.save(plan, kv, block)
        self._use_in_host([kv for _, kv in last])
        for block, _ in last:
            pool.withdraw(block)

    def save(self, plan: PlanRecord, kv: PrefixKV, block: int) -> None:
        """Copy a block to host memory, where the oldest entry makes room for it; if none can, to a file."""
        host = self.host
        if host is None or block in self.pool.uncommitted:
            return
        if kv.host_slot is not None:
            host.use(kv)
            return
        slot = self.take_slot(plan)
        if slot is None:
            self._write(plan, kv, Place(Tier.DEVICE, block))
            return
        host.put(slot, kv, filled=False)
        self._pin(plan, slot)
        plan.saved.append((kv, slot))
        plan.transfers.append(Transfer(Place(Tier.DEVICE, block), Place(Tier.HOST, slot)))
        self.stats.groups[kv.group].num_saved_blocks += 1

    def take_slot(self, plan: PlanRecord) -> int | None:
        """A slot that holds nothing, and that no plan in flight touches; the oldest entry is pushed out for it."""
        assert self.host is not None
        if not self.host.free_slots:
            oldest = self.host.oldest()
            if oldest is None:
                return None
            if not oldest.blocks:  # what the pool has comes down again when the pool loses it
                assert oldest.host_slot is not None
                self._write(plan, oldest, Place(Tier.HOST, oldest.host_slot))
            self.host.drop(oldest)
            self.pool.forget_if_lost(oldest)
        return self.host.free_slots.pop()

    def _write(self, plan: PlanRecord, kv: PrefixKV, source: Place, *, at_once: bool = True) -> bool:
        disk, prefix = self.disk, kv.prefix
        if disk is None:
            return False
        name = disk.name(prefix.hash, prefix.parent_hash, kv.group)
        header = disk.header(prefix.hash, prefix.parent_hash, prefix.token_bytes, kv.group)
        is_ordered = disk.write(plan, name, header, source, at_once=at_once)
        self.stats.groups[kv.group].num_written_files += is_ordered
        return is_ordered

    def write_all(self, plan: PlanRecord) -> None:
        """Order all that is cached to be written to files: the engine is about to end.

        Where room is short, beginnings come first. They are written last, so that they are also the last to be pushed out.
        """
        if self.disk is None:
            return
        before = len(plan.writes)
        found = [kv for prefix in self.pool.parents_first() for kv in prefix.kv if kv is not None]
        for kv in found:
            source = self._committed_copy(kv)
            if source is not None:
                self._write(plan, kv, source, at_once=False)
        plan.writes[before:] = reversed(plan.writes[before:])
        self.touch_files(found)

    def _committed_copy(self, kv: PrefixKV) -> Place | None:
        if kv.host_filled:
            assert kv.host_slot is not None
            return Place(Tier.HOST, kv.host_slot)
        return next((Place(Tier.DEVICE, b) for b in kv.blocks if b not in self.pool.uncommitted), None)

    # ---- up

    def touch(self, plan: PlanRecord, hits: list[PrefixKV], blocks: list[int | None]) -> None:
        """These are hit, parents first, in blocks of the pool or in host memory.

        Beginnings are pushed out last; what must be copied back, not before that is done.
        """
        host = self.host
        if host is None:
            return
        for kv, block in zip(hits, blocks, strict=True):
            if block is None:
                assert kv.host_slot is not None
                self._pin(plan, kv.host_slot)
        self._use_in_host(hits[::-1])
        self.touch_files(hits)

    def _use_in_host(self, hits: list[PrefixKV]) -> None:
        """Those that are in host memory go to the end of the line, in this order."""
        for kv in hits:
            if kv.host_slot is not None and self.host is not None:
                self.host.use(kv)

    def touch_files(self, hits: list[PrefixKV]) -> None:
        """Their files are in use, children before parents."""
        if self.disk is not None:
            for kv in reversed(hits):
                self.disk.use(self.disk.name(kv.prefix.hash, kv.prefix.parent_hash, kv.group))

    def load(self, plan: PlanRecord, kv: PrefixKV, block: int) -> None:
        """Copy what was touched into a block of the pool."""
        assert kv.host_slot is not None
        plan.transfers.append(Transfer(Place(Tier.HOST, kv.host_slot), Place(Tier.DEVICE, block)))
        self.stats.groups[kv.group].num_loaded_blocks += 1

    def _pin(self, plan: PlanRecord, slot: int) -> None:
        assert self.host is not None
        self.host.pin(slot)
        plan.pinned.append(slot)

    # ---- losses

    def withdraw(self, plan: PlanRecord, prefixes: list[Prefix], hashes: list[bytes]) -> None:
        """Forget some prefixes, children first, and all their copies; the files with these hashes, and what follows from one."""
        for prefix in prefixes:
            for kv in filter(None, prefix.kv):
                for block in kv.blocks:
                    self.pool.withdraw(block)
                if kv.host_slot is not None and self.host is not None:
                    self.host.drop(kv)
                    self.pool.forget_if_lost(kv)
            self.pool.forget(prefix)  # there may be sequences that have come as far
        if self.disk is not None:
            self.disk.drop_behind(plan, {*hashes, *(prefix.hash for prefix in prefixes)})

    # ---- plans in flight

    def commit(self, plan: PlanRecord) -> None:
        """A plan was executed: its copies in host memory can be hit."""
        if self.host is None:
            return
        for kv, slot in plan.saved:
            if kv.host_slot == slot:
                kv.host_filled = True
        for slot in plan.pinned:
            self.host.unpin(slot)

    def rollback(self, plan: PlanRecord, spoilt: PlanRecord, next_plan: PlanRecord) -> None:
        """A plan failed: its copies are not there.

        Args:
            plan: the one that is being made.
            next_plan: the one behind the failed one.
        """
        if self.host is None:
            return
        for kv, slot in spoilt.saved:
            if kv.host_slot == slot:
                self.host.drop(kv)
                self.pool.forget_if_lost(kv)
        # The device may still be at its copies: they are over when the next plan is.
        next_plan.pinned += spoilt.pinned
        if self.disk is not None:
            self.disk.rollback(plan, spoilt)

    def clear(self, plan: PlanRecord) -> None:
        if self.host is not None:
            self.host.clear()
        if self.disk is not None:
            self.disk.clear(plan)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        if self.disk is not None:
            self.disk.check()
        if self.host is not None:
            self.host.check()
            for kv in self.host.entries.values():
                found = self.pool.find(kv.prefix.hash, kv.prefix.parent, kv.prefix.token_bytes)
                assert found is kv.prefix, "what host memory holds can be found"
                assert found.kv[kv.group] is kv
