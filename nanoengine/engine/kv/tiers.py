"""LowerTiers: what becomes of blocks that the pool has no room for. Host memory first, then a folder on disk.

A block that is about to be lost is copied down under its prefix; a look-up that misses in the pool goes on here, and a hit is
copied back. The copies are orders for the next batch, in the order in which they must happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from nanoengine.engine.kv.block_pool import BlockPool, Prefix
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.messages import Place, Tier, Transfer


class LowerTiers:
    """Either tier may be missing; without both, what the pool evicts is gone.

    Args:
        host: slots in host memory.
        disk: a folder of files.
    """

    pool: BlockPool

    def __init__(self, host: HostTier | None = None, disk: DiskTier | None = None):
        self.host = host
        self.disk = disk
        self.transfers: list[Transfer] = []
        self.num_saved_blocks = 0
        self.num_loaded_blocks = 0
        self._kept: set[Prefix] = set()  # about to be loaded: not to be pushed out
        self._unsettled_host: list[Prefix] = []  # what the batch in flight writes there

    # ---- down

    def on_evict(self, prefix: Prefix, block: int) -> None:
        """The pool is about to reuse the block that holds the last copy of a prefix: keep it if there is room for free."""
        if self.host is not None and self.host.has_room:
            self.save(prefix, block)
        elif self.disk is not None and prefix.host_slot is None:
            self._write(prefix, Place(Tier.DEVICE, block))

    def save(self, prefix: Prefix, block: int) -> None:
        """Copy a block to host memory; the oldest entry there makes room for it."""
        if self.host is None or prefix.host_slot is not None:
            return
        if not self.host.has_room and not self._push_out_oldest():
            return
        slot = self.host.put(prefix)
        self._unsettled_host.append(prefix)
        self.transfers.append(Transfer(Place(Tier.DEVICE, block), Place(Tier.HOST, slot)))
        self.num_saved_blocks += 1

    def _push_out_oldest(self) -> bool:
        assert self.host is not None
        oldest = self.host.oldest()
        if oldest is None or oldest in self._kept:
            return False
        assert oldest.host_slot is not None
        if self.disk is not None:
            self._write(oldest, Place(Tier.HOST, oldest.host_slot))
        self.host.drop(oldest)
        self.pool.forget_if_lost(oldest)
        return True

    def _write(self, prefix: Prefix, source: Place) -> None:
        assert self.disk is not None
        if prefix.on_disk:
            return
        for lost in self.disk.make_room(self.disk.size_of(prefix)):
            self.pool.forget_if_lost(lost)
        file = self.disk.add(prefix)
        if file is not None:
            self.transfers.append(Transfer(source, Place(Tier.DISK, file[0]), header=file[1]))

    def write_all(self) -> None:
        """Order all that is cached in blocks or host memory to be written to disk: the engine is about to end."""
        if self.disk is None:
            return
        for prefix in list(self.pool.prefixes()):
            if not prefix.blocks and prefix.host_slot is None:
                continue
            on_device = bool(prefix.blocks)
            place = Place(Tier.DEVICE, prefix.blocks[0]) if on_device else Place(Tier.HOST, prefix.host_slot or 0)
            self._write(prefix, place)

    # ---- up

    def find_on_disk(self, hash: bytes, parent: Prefix | None, token_bytes: bytes) -> Prefix | None:
        """A prefix that an earlier process has left in a file; from now on the index knows it."""
        if self.disk is None:
            return None
        owner = self.disk.files.get(hash.hex())
        if owner is not None and owner.parent is not parent and owner.token_bytes == token_bytes:
            # The parent was lost and computed again: it is another object now, and the owner cannot be found any more.
            for lost in self.disk.disown(hash):
                self.pool.forget_if_lost(lost)
        prefix = self.disk.find(hash, parent, token_bytes)
        if prefix is not None:
            self.pool.insert(prefix)
        return prefix

    @contextmanager
    def keeping(self, hits: Sequence[Prefix]) -> Iterator[None]:
        """While the blocks of these hits are taken, what that pushes out must not be one of them."""
        for prefix in hits:
            if prefix.host_slot is not None and self.host is not None:
                self.host.use(prefix)
                self._kept.add(prefix)
            elif not prefix.blocks and self.disk is not None:
                self.disk.use(prefix)
        yield
        self._kept = set()

    def load(self, prefix: Prefix, block: int) -> None:
        """Copy a prefix into a block of the pool."""
        if prefix.host_slot is not None:
            source = Place(Tier.HOST, prefix.host_slot)
        else:
            assert self.disk is not None
            source = Place(Tier.DISK, self.disk.use(prefix))
        self.transfers.append(Transfer(source, Place(Tier.DEVICE, block)))
        self.num_loaded_blocks += 1

    # ---- the batch in flight

    def take_transfers(self) -> list[Transfer]:
        transfers, self.transfers = self.transfers, []
        return transfers

    def commit(self, unwritten: Iterable[str] = ()) -> None:
        """The batch was executed, but for some files that could not be written: those prefixes are not on disk."""
        self._unsettled_host.clear()
        for prefix in self.disk.commit(unwritten) if self.disk is not None else ():
            self.pool.forget_if_lost(prefix)

    def rollback(self) -> None:
        """The batch failed: what it was to write to the tiers is not there."""
        for prefix in self._unsettled_host:
            if prefix.host_slot is not None and self.host is not None:
                self.host.drop(prefix)
                self.pool.forget_if_lost(prefix)
        self._unsettled_host.clear()
        for prefix in self.disk.rollback() if self.disk is not None else ():
            self.pool.forget_if_lost(prefix)

    def clear(self) -> None:
        if self.host is not None:
            self.host.clear()
        if self.disk is not None:
            self.disk.clear()

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        if self.host is not None:
            self.host.check()
            for prefix in self.host.entries.values():
                found = self.pool.find(prefix.hash, prefix.parent, prefix.token_bytes)
                assert found is prefix, "what host memory holds can be found"
