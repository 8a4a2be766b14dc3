"""BlockManager: the block tables of sequences. It turns lengths into blocks, prefixes into hits, and forks into shared blocks.

A sequence has a table for each KV group. Every call that takes blocks either succeeds or leaves tables, counts and the free list
exactly as they were.
"""

from __future__ import annotations

from itertools import zip_longest
from operator import itemgetter
from typing import NamedTuple

from nanoengine.engine.kv.block_pool import NULL_BLOCK, Prefix, PrefixKV
from nanoengine.engine.kv.groups import ENCODER
from nanoengine.engine.kv.prefix_cache import PrefixCache
from nanoengine.engine.messages import Entries, Place, Tier, Transfer
from nanoengine.engine.sequence import Sequence


class Share(NamedTuple):
    """What a sequence gets of another's: references, and how far the cache knows them."""

    tables: list[list[int]]
    first_blocks: list[int]
    num_published: int
    prefix: Prefix | None
    block_hashes: list[bytes]
    block_tokens: list[bytes]


class BlockManager(PrefixCache):
    """Gives blocks to sequences, for all groups from one pool; those of a cached prefix to all that begin with it."""

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # ---- slots

    def admit(self, seq: Sequence) -> int | None:
        """Give a sequence without blocks all that it needs for its tokens and the next one: the whole sequence must fit.

        In a group that forgets, that is as many as it ever has at once. Looking up the prefix and pinning its blocks is one call,
        so that nothing can evict a hit in between. Blocks that only host memory has are copied back by the plan.

        Returns:
            the number of its tokens that need not be computed, a multiple of the block size and smaller than `num_tokens`
            (the last token is always computed, for its logits); None if the pool lacks blocks.
        """
        assert not seq.block_tables
        pool, groups = self.pool, self.groups
        if pool.num_free == 0:  # at least one block is always new: do not look for the others in vain
            return None
        looks_up = self._looks_up(seq)
        hits = self._find_hit(seq, self._num_cacheable(seq)) if looks_up else []
        num_cached = len(hits) * self.block_size
        first_blocks = [groups.first_block(group, num_cached) for group in range(len(groups))]
        wanted: list[list[PrefixKV]] = [[] for _ in first_blocks]
        for group in self._growing:
            found = (prefix.kv[group] for prefix in hits[first_blocks[group] :])
            wanted[group] = [kv for kv in found if kv is not None]
        held = [[self._block_of(kv) for kv in kvs] for kvs in wanted]
        ends = self._ends(seq, first_blocks, seq.num_tokens + 1)
        missing = [
            end - first - sum(block is not None for block in blocks)
            for end, first, blocks in zip(ends, first_blocks, held, strict=True)
        ]
        on_device = [block for blocks in held for block in blocks if block is not None]
        num_revived = sum(pool.ref_counts[block] == 0 for block in on_device)
        if sum(missing) + num_revived > pool.num_free:
            return None
        pool.acquire(on_device)
        touched = [
            (i, kv, block)
            for first, kvs, blocks in zip(first_blocks, wanted, held, strict=True)
            for i, (kv, block) in enumerate(zip(kvs, blocks, strict=True), first)
        ]
        touched.sort(key=itemgetter(0))
        self.tiers.touch(self._plan, [kv for _, kv, _ in touched], [block for _, _, block in touched])
        new = self._allocate(sum(missing))
        fetched = None if self._reads is None else self._reads.end(seq)
        tiers = [Tier.DEVICE] * len(hits)
        taken = 0
        for group, (first, kvs, blocks) in enumerate(zip(first_blocks, wanted, held, strict=True)):
            table = [NULL_BLOCK] * first
            of_group, taken = iter(new[taken : taken + missing[group]]), taken + missing[group]
            for i, (kv, block) in enumerate(zip(kvs, blocks, strict=True), first):
                if block is None:
                    block = next(of_group)
                    self._load(seq, kv, block)
                    was_read = fetched is not None and (kv.prefix.hash, group) in fetched.reads
                    tiers[i] = Tier.DISK if was_read or tiers[i] is Tier.DISK else Tier.HOST
                table.append(block)
            seq.block_tables.append([*table, *of_group])
            self.stats.groups[group].num_hit_blocks += len(kvs)
        for tier in tiers:
            self.stats.hits_by_tier[tier] += self.block_size
        seq.first_blocks = first_blocks
        seq.num_slots = self._num_slots(seq)
        seq.num_published = len(hits)
        if hits:
            seq.prefix = hits[-1]
            pool.use(seq.prefix)
        if looks_up:
            self.stats.record(seq.num_tokens, num_cached, resumed=seq.num_cached_tokens is not None)
        return num_cached

    def _ends(self, seq: Sequence, first_blocks: list[int], num_tokens: int, num_lookahead: int = 1) -> list[int]:
        """How long the tables of a sequence must be, for so many tokens at last; in a group that forgets, that is at a time."""
        last, ends = self.blocks_for(num_tokens), []
        more = self.blocks_for(max(num_lookahead - 1, 0))  # one token behind those of a step has room in any case
        for group, (first, spec) in enumerate(zip(first_blocks, self.groups.specs, strict=True)):
            if spec.kind == ENCODER:
                ends.append(self.blocks_for(seq.num_encoder_tokens))
            elif spec.forgets:
                ends.append(min(last, first + self.groups.most_blocks(group, num_tokens) + more))
            else:
                ends.append(last)
        return ends

    def _num_slots(self, seq: Sequence) -> int:
        return min(len(seq.block_tables[group]) for group in self._growing) * self.block_size

    def allocate_slots(self, seq: Sequence, num_lookahead: int = 0) -> list[Entries] | None:
        """Make room, in blocks of its own, for the K/V of all tokens of a running sequence and some that may follow.

        What no later token sees is given back first; a block that it shares and is about to write to is copied. Blocks that are
        complete by now are published; lookahead slots never are, before their tokens are accepted and computed.

        Returns:
            what changed in its tables; None, and nothing changed, if the pool lacks blocks.
        """
        pool, size, tables = self.pool, self.block_size, seq.block_tables
        num_computed = seq.num_computed_tokens
        if (
            seq.num_slots == num_computed == seq.num_tokens - 1
            and not (num_lookahead or self._spoilt)
            and len(pool.empty_blocks) + len(pool.cached_blocks) >= self._num_growing
        ):  # By far most often: the next token, the only one to compute, begins a block of the sequence's own.
            return self._begin_block(seq, num_computed)
        groups = range(len(tables))
        first_blocks = [self.groups.first_block(group, num_computed) for group in groups]
        ends = self._ends(seq, first_blocks, seq.num_tokens + num_lookahead, num_lookahead)
        forgotten = [tables[group][seq.first_blocks[group] : first_blocks[group]] for group in groups]
        missing = [max(end - len(table), 0) for end, table in zip(ends, tables, strict=True)]
        tail = num_computed // size  # the block that is written next
        shared = [g for g in self._growing if tail < len(tables[g]) and pool.ref_counts[tables[g][tail]] > 1]
        num_freed = sum(pool.ref_counts[block] == 1 for blocks in forgotten for block in blocks)
        if sum(missing) + len(shared) > pool.num_free + num_freed:
            return None
        self.publish(seq, seq.num_written_tokens)
        changes = [self._forget(seq, group, forgotten[group]) for group in groups if forgotten[group]]
        changes += [self._copy_on_write(seq, group, tail) for group in shared]
        for group in groups:
            if missing[group]:
                new = self._allocate(missing[group])
                changes.append(Entries(seq.row, group, len(tables[group]), new))
                tables[group] += new
        seq.num_slots = self._num_slots(seq)
        return changes

    def _begin_block(self, seq: Sequence, num_computed: int) -> list[Entries]:
        """`allocate_slots` where the next token of a sequence begins a block in every group."""
        self.publish(seq, min(num_computed, len(seq.token_ids) - 1))
        pool, size, changes = self.pool, self.block_size, []
        for group, spec in self._forgetting:
            first = seq.first_blocks[group]
            if (end := spec.first_seen(num_computed) // size) > first:
                changes.append(self._forget(seq, group, seq.block_tables[group][first:end]))
        for group, table in enumerate(seq.block_tables):
            if len(table) * size == num_computed and group < self._num_growing:
                new = [pool.take_empty()] if pool.empty_blocks else self._allocate(1)
                changes.append(Entries(seq.row, group, len(table), new))
                table += new
        seq.num_slots = num_computed + size
        return changes

    def _forget(self, seq: Sequence, group: int, blocks: list[int]) -> Entries:
        """Give back the next blocks of a table: no later token sees them."""
        first = seq.first_blocks[group]
        seq.first_blocks[group] += len(blocks)
        contents, forgotten = self.pool.contents, self._plan.forgotten
        for block in blocks:
            kv = contents[block]
            forgotten.append((seq, seq.block_tables, block, None if kv is None else kv.prefix))
        self.pool.release(reversed(blocks))
        self.stats.groups[group].num_forgotten_blocks += len(blocks)
        nulls = [NULL_BLOCK] * len(blocks)
        seq.block_tables[group][first : first + len(blocks)] = nulls
        return Entries(seq.row, group, first, nulls)

    def trim(self, seq: Sequence, *, wipe: bool = False) -> None:
        """Take back the blocks of lookahead slots that no token came to need.

        Args:
            wipe: as for `discard`.
        """
        keep = self.blocks_for(seq.num_tokens)
        for group in self._growing:
            blocks = seq.block_tables[group][keep:]
            self.pool.release(reversed(blocks))
            if wipe:
                self._spoilt.update(blocks)
            del seq.block_tables[group][keep:]
        seq.num_slots = min(seq.num_slots, keep * self.block_size)

    def free(self, seq: Sequence) -> None:
        """Publish what a sequence has written, and drop its blocks. It may have none."""
        if seq.block_tables:
            self.publish(seq, seq.num_written_tokens)
        self.discard(seq)

    def discard(self, seq: Sequence, *, wipe: bool = False) -> None:
        """Drop the blocks of a sequence, the tail first: a prefix is worth more than what follows it.

        Args:
            wipe: they may hold what is no number. Those that nobody can find any more are overwritten with the null block before
                they are used again, since there are kernels that multiply what nobody wrote by 0.
        """
        self.cancel_fetch(seq)
        blocks = _tail_first(seq.block_tables)
        if self.pool.uncommitted:  # if their plan fails, so does what this one has promised
            for block in blocks:
                kv = self.pool.contents[block] if block in self.pool.uncommitted else None
                if kv is not None:
                    self._plan.forgotten.append((seq, seq.block_tables, block, kv.prefix))
        self.pool.release(blocks)
        if wipe:
            plans = (*self._in_flight, self._plan)
            blocks += [block for plan in plans for owner, _, block, _ in plan.forgotten if owner is seq]
            pool = self.pool
            self._spoilt |= {b for b in blocks if not pool.ref_counts[b] and pool.contents[b] is None}
        seq.block_tables, seq.first_blocks = [], []
        seq.num_slots = seq.num_published = 0
        if seq.prefix is not None:
            self.pool.leave(seq.prefix)
        seq.prefix = None

    def condemn(self, seq: Sequence) -> None:
        """Drop the blocks of a sequence whose K/V may be wrong: no tier has its prefix any more, nor what follows from that.

        It may have been preempted, or have ended, since a plan computed it.
        """
        pool = self.pool
        prefixes = pool.behind([prefix for hash in seq.block_hashes for prefix in pool.of_hash(hash)])
        blocks = {block for prefix in prefixes for kv in prefix.kv if kv is not None for block in kv.blocks}
        self.tiers.withdraw(self._plan, prefixes, seq.block_hashes)
        self._spoilt |= {block for block in blocks if not pool.ref_counts[block]}
        if self._reads is not None:
            self._reads.forget_dropped()
        self.discard(seq, wipe=True)

    def swap_out(self, seq: Sequence) -> None:
        """`free`, with the complete blocks copied to host memory first: those of the longest hit that it has room for."""
        self.publish(seq, seq.num_written_tokens)
        room = 0 if self.tiers.host is None else self.tiers.host.num_available
        count = seq.num_published
        while count and not self._fits(seq, count, room):
            count -= 1
        firsts = self._first_blocks(count)
        tables = [[*[NULL_BLOCK] * first, *seq.block_tables[group][first:count]] for group, first in enumerate(firsts)]
        for block in _tail_first(tables):  # the beginning is pushed out last
            kv = self.pool.contents[block]
            if kv is not None:
                self.tiers.save(self._plan, kv, block)
        self.discard(seq)

    def _fits(self, seq: Sequence, count: int, room: int) -> bool:
        """Whether a sequence still has all blocks that a hit of `count` needs, and they are at most `room`."""
        firsts = self._first_blocks(count)
        return sum(count - first for first in firsts) <= room and all(
            first >= had or first == count for first, had in zip(firsts, seq.first_blocks, strict=False)
        )

    def _first_blocks(self, count: int) -> list[int]:
        """Of each group that grows, the first block that a hit of so many needs."""
        return [self.groups.first_block(group, count * self.block_size) for group in self._growing]

    def num_blocks_of(self, seq: Sequence) -> int:
        """Blocks that a sequence has, in all groups."""
        return sum(len(table) - first for table, first in zip(seq.block_tables, seq.first_blocks, strict=True))

    def get_num_common_prefix_blocks(self, seqs: list[Sequence]) -> list[int]:
        """For each group, how many of their first blocks some sequences share, as far as these are complete.

        A group that forgets has none: its tables begin with what nobody sees any more.
        """
        counts = [0] * len(self.groups)
        for group in self._complete if seqs else []:
            # Most often nothing is shared: the number of references tells that at once.
            references, table = self.pool.ref_counts, seqs[0].block_tables[group]
            end = next((i for i, block in enumerate(table) if references[block] < len(seqs)), len(table))
            if end:
                end = min(end, *(seq.num_computed_tokens // self.block_size for seq in seqs))
                tables = [seq.block_tables[group][:end] for seq in seqs]
                first, last = min(tables), max(tables)  # where these agree, all do
                counts[group] = next((i for i, (a, b) in enumerate(zip(first, last, strict=True)) if a != b), end)
        return counts

    def check_tables(self, seq: Sequence) -> None:
        """Raise AssertionError if the tables of a running sequence cannot be right."""
        blocks = [block for table in seq.block_tables for block in table if block != NULL_BLOCK]
        assert len(set(blocks)) == len(blocks)
        assert len(seq.block_tables) == len(seq.first_blocks) == len(self.groups)
        for group, (table, first) in enumerate(zip(seq.block_tables, seq.first_blocks, strict=True)):
            assert all((block == NULL_BLOCK) == (i < first) for i, block in enumerate(table))
            if group in self._growing:
                assert len(table) >= self.blocks_for(seq.num_computed_tokens)
                assert first <= self.groups.first_block(group, seq.num_computed_tokens), "all that its next token sees"

    def _allocate(self, count: int) -> list[int]:
        pool = self.pool
        if count > len(pool.empty_blocks):
            self.tiers.evict(self._plan, pool.next_evicted(count))
        blocks = pool.allocate(count)
        if self._spoilt:
            null, wiped = Place(Tier.DEVICE, NULL_BLOCK), self._spoilt.intersection(blocks)
            self._plan.transfers += [Transfer(null, Place(Tier.DEVICE, block)) for block in sorted(wiped)]
            self._spoilt -= wiped
        return blocks

    def _block_of(self, kv: PrefixKV) -> int | None:
        """A block that holds it; of several copies, one that is in use costs no free block."""
        if len(kv.blocks) > 1:
            return next((block for block in kv.blocks if self.pool.ref_counts[block]), kv.blocks[0])
        return kv.blocks[0] if kv.blocks else None

    def _load(self, seq: Sequence, kv: PrefixKV, block: int) -> None:
        """Let the plan copy a prefix from host memory into a new block."""
        self.tiers.load(self._plan, kv, block)
        self.pool.attach(block, kv.prefix, kv.group)
        self._promise(seq, block, kv.prefix)

    # ---- forks

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a sequence without blocks share all those of another, the half-full last one too.

        `child` has the parent's tokens, at least those that are computed. The first to write into a shared block gets a copy.
        """
        assert not child.block_tables
        self.cancel_fetch(child)
        assert child.num_computed_tokens >= parent.num_computed_tokens, "it writes nothing that the parent has written"
        self.publish(parent, parent.num_written_tokens)
        self._give(child, self._share(parent, child.num_computed_tokens))
        parent.num_slots = 0  # before it writes again, `allocate_slots` looks for shared blocks
        self._plan.forks.append((parent, child))

    def refork(self, seqs: list[Sequence], parents: list[Sequence]) -> None:
        """Make each of some sequences of equal length share the blocks of one of them, all at once."""
        for seq in seqs:
            self.publish(seq, seq.num_written_tokens)
        shares = [self._share(parent, parent.num_computed_tokens) for parent in parents]
        for seq, share in zip(seqs, shares, strict=True):
            self.pool.release(_tail_first(seq.block_tables))
            if seq.prefix is not None:
                self.pool.leave(seq.prefix)
            self._give(seq, share)
        self._plan.forks += zip(parents, seqs, strict=True)

    def _share(self, seq: Sequence, num_tokens: int) -> Share:
        """Another reference to each block that so many tokens of a sequence are in."""
        end = self.blocks_for(num_tokens)
        tables = [
            table[:end] if group in self._growing else table.copy() for group, table in enumerate(seq.block_tables)
        ]
        self.pool.acquire(_tail_first(tables))
        if seq.prefix is not None:
            self.pool.use(seq.prefix)
        count = seq.num_published
        hashes, tokens = seq.block_hashes[:count], seq.block_tokens[:count]
        return Share(tables, seq.first_blocks.copy(), count, seq.prefix, hashes, tokens)

    def _give(self, seq: Sequence, share: Share) -> None:
        seq.block_tables[:], seq.first_blocks, seq.num_published, seq.prefix, seq.block_hashes, seq.block_tokens = share
        seq.num_slots = 0

    def _copy_on_write(self, seq: Sequence, group: int, index: int) -> Entries:
        shared = seq.block_tables[group][index]
        (own,) = self._allocate(1)
        self._plan.transfers.append(Transfer(Place(Tier.DEVICE, shared), Place(Tier.DEVICE, own)))
        self.pool.release([shared])
        seq.block_tables[group][index] = own
        self.stats.groups[group].num_copied_blocks += 1
        return Entries(seq.row, group, index, [own])


def _tail_first(tables: list[list[int]]) -> list[int]:
    """The blocks of all tables, those of the last tokens first."""
    if len(tables) == 1:
        return [block for block in reversed(tables[0]) if block != NULL_BLOCK]
    rows = list(zip_longest(*tables, fillvalue=NULL_BLOCK))
    return [block for row in reversed(rows) for block in row if block != NULL_BLOCK]
