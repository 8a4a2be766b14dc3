"""FileReads: prefixes that come from files into host memory, and the sequences that wait for them.

A sequence waits for a batch of reads, which it may share with others. When the last one is over, its prefix is walked from the
start once more, and what came is given to the prefixes that it belongs to; a slot that no prefix reaches is given back. A read
that fails is a miss. Whatever came, stays pinned until the sequence is admitted.

An answer to a read ends all orders of it so far: the executor begins no read that it is doing, or that it has done without having
said so. Reads, deletions and writes are carried out in the order in which they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from nanoengine.engine.kv.block_pool import BlockPool, Prefix, PrefixKV
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.groups import ENCODER, FULL, Groups
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.kv.orders import PlanRecord
from nanoengine.engine.kv.tiers import LowerTiers
from nanoengine.engine.messages import FileDone, FileRead
from nanoengine.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Read:
    """One file on its way into a slot, which it has pinned."""

    order: FileRead
    waiting: dict[Sequence, None] = field(default_factory=dict)
    is_wanted: bool = True  # False: its K/V must not be used
    is_done: bool = False
    came: bool = False  # done, and sound


@dataclass(slots=True, eq=False)
class Fetch:
    """What one sequence waits for, or has waited for."""

    reads: dict[tuple[bytes, int], Read] = field(default_factory=dict)  # by hash and group
    num_left: int = 0
    pinned: list[int] = field(default_factory=list)  # slots of its prefix, until it is admitted


class FileReads:
    """The reads in progress.

    Args:
        pool: its index has the prefixes.
        tiers: where slots come from, and files.
        groups: that need blocks.
    """

    def __init__(self, pool: BlockPool, tiers: LowerTiers, groups: Groups):
        assert tiers.host is not None
        assert tiers.disk is not None
        self.pool = pool
        self.tiers = tiers
        self.groups = groups
        self.host: HostTier = tiers.host
        self.disk: DiskTier = tiers.disk
        self.fetches: dict[Sequence, Fetch] = {}
        self._reads: dict[str, Read] = {}  # not answered yet, by name

    def begin(self, plan: PlanRecord, seq: Sequence, chain: list[Prefix], count: int) -> bool:
        """Order the files that continue what a sequence hits in memory, as many as there are slots for.

        Args:
            chain: what the index knows of it.
            count: blocks that it may take from the cache; they are hashed.

        Returns:
            whether it has to wait.
        """
        fetch = self.fetches[seq] = Fetch()

        def has(group: int, i: int) -> bool:
            return _kv_of(chain, group, i) is not None or self._can_read(seq, group, i)

        hits, wanted, excess = self._needed(chain, self._reach(count, has))
        while excess > 0:  # part of a window is of no use: what there are slots for must be a hit
            shorter = max(i for _, i in wanted) + 1 - -(-excess // len(self.groups))
            hits, wanted, excess = self._needed(chain, self._reach(shorter, has))
        for kv in hits:
            if kv.host_slot is not None:
                self._pin(fetch, kv.host_slot)
        for group, i in wanted:
            read = self._read(plan, seq, group, i)
            if read is None:
                break
            read.waiting[seq] = None
            fetch.reads[seq.block_hashes[i], group] = read
        fetch.num_left = len(fetch.reads)
        self.tiers.touch_files(hits)
        if not fetch.reads:
            self._unpin(fetch)
        return bool(fetch.reads)

    def _needed(self, chain: list[Prefix], end: int) -> tuple[list[PrefixKV], list[tuple[int, int]], int]:
        """Of a hit of `end` blocks: what memory has, (group, block) of what must be read, and how many slots that lacks."""
        hits: list[PrefixKV] = []
        wanted: list[tuple[int, int]] = []
        for i in range(end):
            for group in self._groups_that_see(i, end):
                kv = _kv_of(chain, group, i)
                if kv is None:
                    wanted.append((group, i))
                else:
                    hits.append(kv)
        kept = sum(kv.host_slot is not None and not self.host.pins[kv.host_slot] for kv in hits)
        return hits, wanted, len(wanted) - (self.host.num_available - kept) if wanted else 0

    def _reach(self, count: int, has: Callable[[int, int], bool]) -> int:
        """The most leading blocks that all groups could hit, given which group has which block."""
        complete = [group for group, spec in enumerate(self.groups.specs) if spec.kind == FULL]
        end = next((i for i in range(count) if not all(has(group, i) for group in complete)), count)
        return self.groups.longest_hit(end, has)

    def _groups_that_see(self, i: int, end: int) -> list[int]:
        """Those that need block i for a hit of `end` blocks."""
        position = end * self.groups.block_size
        kinds = enumerate(self.groups.specs)
        return [g for g, spec in kinds if spec.kind != ENCODER and self.groups.first_block(g, position) <= i]

    def _name(self, seq: Sequence, group: int, i: int) -> str:
        """Of the file of a block."""
        return self.disk.name(seq.block_hashes[i], seq.block_hashes[i - 1] if i else b"", group)

    def _header(self, seq: Sequence, group: int, i: int) -> bytes:
        parent_hash = seq.block_hashes[i - 1] if i else b""
        return self.disk.header(seq.block_hashes[i], parent_hash, seq.block_tokens[i], group)

    def _can_read(self, seq: Sequence, group: int, i: int) -> bool:
        read = self._reads.get(name := self._name(seq, group, i))
        if read is not None:  # somebody else waits for it
            return read.is_wanted and read.order.header == self._header(seq, group, i)
        return self.disk.can_read(name)

    def _read(self, plan: PlanRecord, seq: Sequence, group: int, i: int) -> Read | None:
        """Order a file that can be read; None if there is no slot."""
        name = self._name(seq, group, i)
        if name in self._reads:
            return self._reads[name]
        slot = self.tiers.take_slot(plan)
        if slot is None:
            return None
        self.host.pin(slot)
        self.disk.barred.add(name)
        read = self._reads[name] = Read(FileRead(self.disk.path(name), self._header(seq, group, i), slot))
        plan.reads.append(read.order)
        self.tiers.stats.groups[group].num_read_files += 1
        return read

    def is_fetching(self, seq: Sequence) -> bool:
        fetch = self.fetches.get(seq)
        return fetch is not None and fetch.num_left > 0

    def end(self, seq: Sequence) -> Fetch | None:
        """A sequence is admitted, or waits no longer: what it has pinned may be pushed out. Returns what it had waited for."""
        fetch = self.fetches.pop(seq, None)
        if fetch is not None:
            self._unpin(fetch)
            self._leave(seq, fetch)
        return fetch

    def answer(self, plan: PlanRecord, done: FileDone) -> None:
        """A read or write is over; any other path is none of ours."""
        name = self.disk.name_at(done.path)
        if name is None:
            return
        read = self._reads.pop(name, None)
        if read is None:
            if name in self.disk.writing or name in self.disk.barred:
                self.tiers.stats.num_bad_files += done.problem is not None
                self.disk.answer_write(plan, name, done.problem)
            return
        self.disk.barred.discard(name)
        read.is_done = True
        read.came = done.problem is None
        if not read.came:
            self.tiers.stats.num_bad_files += 1
            self.disk.drop(plan, name)
        if read.order in plan.reads:  # a plan that failed after all began it
            plan.reads.remove(read.order)
        if not read.waiting:
            self.host.unpin(read.order.slot)
        for seq in list(read.waiting):
            fetch = self.fetches[seq]
            fetch.num_left -= 1
            if not fetch.num_left:
                self._assemble(seq, fetch)
                self._leave(seq, fetch)

    def _assemble(self, seq: Sequence, fetch: Fetch) -> None:
        """Give what came to the prefixes of a sequence, as far as that makes a hit."""
        hashes = seq.block_hashes
        chain: list[Prefix] = []
        for hash, token_bytes in zip(hashes, seq.block_tokens, strict=True):
            found = self.pool.find(hash, chain[-1] if chain else None, token_bytes)
            if found is None:
                break
            chain.append(found)

        def came(group: int, i: int) -> Read | None:
            read = fetch.reads.get((hashes[i], group))
            return read if read is not None and read.came and read.is_wanted else None

        def has(group: int, i: int) -> bool:
            kv = chain[i].kv[group] if i < len(chain) else None
            return came(group, i) is not None if kv is None else kv.can_be_hit

        end = self._reach(len(hashes), has)
        hits: list[PrefixKV] = []
        parent: Prefix | None = None
        for i in range(end):
            # The file was compared with the tokens of the sequence; its parent is the one that was just reached.
            parent = self.pool.add(hashes[i], parent, seq.block_tokens[i])
            for group in self._groups_that_see(i, end):
                kv, read = self.pool.kv_of(parent, group), came(group, i)
                if not kv.can_be_hit:
                    assert read is not None
                    self.host.put(read.order.slot, kv, filled=True)
                if kv.host_slot is not None and (hashes[i], group) in fetch.reads:
                    self._pin(fetch, kv.host_slot)
                hits.append(kv)
        if parent is not None:  # if it has nothing after all, it must not stay
            self.pool.use(parent)
            self.pool.leave(parent)
        for kv in reversed(hits):
            if kv.host_slot is not None:
                self.host.use(kv)
        self.tiers.touch_files(hits)

    def _leave(self, seq: Sequence, fetch: Fetch) -> None:
        """A sequence waits for its reads no longer. A slot that then is nobody's is free, unless a prefix has it."""
        fetch.num_left = 0
        for read in fetch.reads.values():
            if seq in read.waiting:
                del read.waiting[seq]
                if read.is_done and not read.waiting:
                    self.host.unpin(read.order.slot)

    def forget_dropped(self) -> None:
        """Files were dropped because their K/V must not be used any more: nor must what was read from them."""
        reads = [*self._reads.values(), *(read for fetch in self.fetches.values() for read in fetch.reads.values())]
        for read in reads:
            if self.disk.name_at(read.order.path) not in self.disk.files:
                read.is_wanted = False

    def rollback(self, plan: PlanRecord) -> None:
        """A plan failed: the next one is to read all that was not answered, since an answer may be lost with it.

        What is being read the executor does not begin again.
        """
        ordered = {order.path for order in plan.reads}
        plan.reads += [read.order for read in self._reads.values() if read.order.path not in ordered]

    def pinned_slots(self) -> Iterator[int]:
        """One for each pin."""
        reads = {read: None for fetch in self.fetches.values() for read in fetch.reads.values() if read.waiting}
        for read in {**dict.fromkeys(self._reads.values()), **reads}:
            yield read.order.slot
        for fetch in self.fetches.values():
            yield from fetch.pinned

    def _pin(self, fetch: Fetch, slot: int) -> None:
        self.host.pin(slot)
        fetch.pinned.append(slot)

    def _unpin(self, fetch: Fetch) -> None:
        for slot in fetch.pinned:
            self.host.unpin(slot)
        fetch.pinned.clear()


def _kv_of(chain: list[Prefix], group: int, i: int) -> PrefixKV | None:
    """What memory has of a block in a group, if it can be hit."""
    kv = chain[i].kv[group] if i < len(chain) else None
    return kv if kv is not None and kv.can_be_hit else None
