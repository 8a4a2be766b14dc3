"""BlockManager: the block tables of sequences. It turns lengths into blocks, prefixes into hits, and forks into shared blocks.

A table only grows: whatever else changes one makes a new list of it, so that whoever knows its beginning need not look again.
Every call that takes blocks either succeeds or leaves tables, counts and the free list exactly as they were.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

from nanoengine.engine.kv.block_pool import BlockPool, Prefix
from nanoengine.engine.kv.statistics import CacheStats
from nanoengine.engine.kv.tiers import LowerTiers
from nanoengine.engine.messages import Place, Tier, Transfer
from nanoengine.engine.sequence import Sequence


class BlockManager:
    """Gives blocks of `block_size` tokens to sequences, from one pool.

    Args:
        num_blocks: usable blocks of the pool.
        block_size: tokens per block.
        enable_prefix_caching: find and publish prefixes; without it every block is private, but for forks.
        tiers: where blocks go that the pool has no room for.
        hash_seed: seed of the prefix hashes; None draws one.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        *,
        tiers: LowerTiers | None = None,
        hash_seed: int | None = None,
    ):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, hash_seed)
        self.stats = CacheStats()
        self.tiers = LowerTiers() if tiers is None else tiers
        self.tiers.pool = self.pool
        self.pool.on_evict = self._on_evict
        self._unsettled: list[int] = []  # blocks whose content the batch that is being made will write
        self._in_flight: deque[list[int]] = deque()  # the same of each batch that was handed out, the oldest first

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # ---- slots

    def admit(self, seq: Sequence) -> int | None:
        """Give a sequence without blocks all that it needs for its tokens and the next one: the whole sequence must fit.

        Looking up the prefix and pinning its blocks is one call, so that nothing can evict a hit in between. Blocks that
        only a lower tier has are copied back by the next batch.

        Returns:
            the number of its tokens that need not be computed, a multiple of the block size and smaller than `num_tokens`
            (the last token is always computed, for its logits); None if the pool lacks blocks.
        """
        assert not seq.block_table
        pool = self.pool
        if pool.num_free == 0:  # at least one block is always new: do not look for the others in vain
            return None
        hits = self._find_prefix(seq)
        held = [self._block_of(prefix) for prefix in hits]
        on_device = [block for block in held if block is not None]
        num_new = self.blocks_for(seq.num_tokens + 1) - len(on_device)
        num_revived = sum(pool.ref_counts[block] == 0 for block in on_device)
        if num_new + num_revived > pool.num_free:
            return None
        pool.acquire(on_device)
        table = []
        with self.tiers.keeping(hits):
            for prefix, block in zip(hits, held, strict=True):
                table.append(self._load(prefix) if block is None else block)
                self.stats.hits_by_tier[self._tier_of(prefix, block)] += self.block_size
            table += pool.allocate(self.blocks_for(seq.num_tokens + 1) - len(hits))
        seq.block_table = table
        seq.num_slots = len(table) * self.block_size
        seq.num_published = len(hits)
        num_cached = len(hits) * self.block_size
        self.stats.record(seq.num_tokens, num_cached, resumed=seq.num_cached_tokens is not None)
        return num_cached

    def allocate_slots(self, seq: Sequence, num_lookahead: int = 0) -> bool:
        """Make room, in blocks of its own, for the K/V of all tokens of a running sequence and some that may follow.

        A block that it shares and is about to write to is copied first. Blocks that are complete by now are published;
        lookahead slots never are, before their tokens are accepted and computed.

        Returns:
            False, and nothing changed, if the pool lacks blocks.
        """
        pool, table = self.pool, seq.block_table
        missing = max(self.blocks_for(seq.num_tokens + num_lookahead) - len(table), 0)
        tail = seq.num_computed_tokens // self.block_size  # the block that is written next
        is_shared = tail < len(table) and pool.ref_counts[table[tail]] > 1
        if missing + is_shared > pool.num_free:
            return False
        self.publish(seq, seq.num_written_tokens)
        if is_shared:
            self._copy_on_write(seq, tail)
        seq.block_table += pool.allocate(missing)
        seq.num_slots = len(seq.block_table) * self.block_size
        return True

    def trim(self, seq: Sequence) -> None:
        """Take back the blocks of lookahead slots that no token came to need."""
        keep = self.blocks_for(seq.num_tokens)
        self.pool.release(reversed(seq.block_table[keep:]))
        seq.block_table = seq.block_table[:keep]
        seq.num_slots = min(seq.num_slots, keep * self.block_size)

    def free(self, seq: Sequence) -> None:
        """Drop the blocks of a sequence, the tail first: a prefix is worth more than what follows it."""
        if not seq.block_table:
            return
        self.publish(seq, seq.num_written_tokens)
        self.pool.release(reversed(seq.block_table))
        seq.block_table = []
        seq.num_slots = seq.num_published = 0

    def swap_out(self, seq: Sequence) -> None:
        """`free`, with the complete blocks copied to host memory first, as many as it has room for."""
        self.publish(seq, seq.num_written_tokens)
        room = 0 if self.tiers.host is None else self.tiers.host.num_slots
        for block in reversed(seq.block_table[: min(seq.num_published, room)]):  # the beginning is pushed out last
            prefix = self.pool.contents[block]
            assert prefix is not None
            self.tiers.save(prefix, block)
        self.free(seq)

    # ---- forks

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a sequence without blocks share all those of another, the half-full last one too.

        `child` has the parent's tokens, at least those that are computed. The first to write into a shared block gets a copy.
        """
        assert not child.block_table
        assert child.num_computed_tokens >= parent.num_computed_tokens, "it writes nothing that the parent has written"
        self.publish(parent, parent.num_written_tokens)
        child.block_table = parent.block_table[: self.blocks_for(child.num_computed_tokens)]
        self.pool.acquire(child.block_table)
        child.num_published = min(parent.num_published, len(child.block_table))
        child.block_hashes = parent.block_hashes[: child.num_published]
        child.block_tokens = parent.block_tokens[: child.num_published]
        parent.num_slots = child.num_slots = 0  # before either writes again, `allocate_slots` looks for shared blocks

    def refork(self, seqs: list[Sequence], parents: list[Sequence]) -> None:
        """Make each of some sequences of equal length share the blocks of one of them, all at once."""
        for seq in seqs:
            self.publish(seq, seq.num_written_tokens)
        new = [
            (
                p.block_table[: self.blocks_for(p.num_computed_tokens)],
                p.num_published,
                list(p.block_hashes),
                list(p.block_tokens),
            )
            for p in parents
        ]
        old = [seq.block_table for seq in seqs]
        for table, *_ in new:
            self.pool.acquire(table)
        for table in old:
            self.pool.release(reversed(table))
        for seq, state in zip(seqs, new, strict=True):
            seq.block_table, seq.num_published, seq.block_hashes, seq.block_tokens = state
            seq.num_slots = 0

    def _copy_on_write(self, seq: Sequence, index: int) -> None:
        shared = seq.block_table[index]
        (own,) = self.pool.allocate(1)
        self.tiers.transfers.append(Transfer(Place(Tier.DEVICE, shared), Place(Tier.DEVICE, own)))
        self.pool.release([shared])
        seq.block_table = [*seq.block_table[:index], own, *seq.block_table[index + 1 :]]
        self.stats.num_copied_blocks += 1

    # ---- the prefix cache

    def publish(self, seq: Sequence, num_computed_tokens: int, *, settled: bool = True) -> None:
        """Publish the blocks of a sequence that are complete when so many of its tokens are computed.

        `settled=False` says that the next batch computes them: `rollback` withdraws them if it fails.
        """
        last = num_computed_tokens // self.block_size
        first = seq.num_published
        if first >= last or not self.enable_prefix_caching:
            return
        pool, table = self.pool, seq.block_table
        parent = pool.contents[table[first - 1]] if first else None
        self._hash_blocks(seq, last)
        for i in range(first, last):
            parent = pool.add(seq.block_hashes[i], parent, seq.block_tokens[i])
            pool.attach(table[i], parent)
        if not settled:
            self._unsettled += table[first:last]
        seq.num_published = last

    def take_transfers(self) -> list[Transfer]:
        """Hand out a batch: the copies that it must make before it computes anything."""
        self._in_flight.append(self._unsettled)
        self._unsettled = []
        return self.tiers.take_transfers()

    def commit(self, unwritten: Iterable[str] = ()) -> None:
        """The oldest batch in flight was executed: what it was to write is there, but for the files named."""
        self._in_flight.popleft()
        self.tiers.commit(unwritten)

    def rollback(self) -> set[int]:
        """The oldest batch in flight failed: withdraw what it was to write, and return those blocks.

        What batches behind it were to write is withdrawn too, children first: it may follow from the other.
        """
        for blocks in reversed(self._in_flight):
            for block in reversed(blocks):
                self.pool.withdraw(block)
        spoilt, *later = self._in_flight
        self._in_flight = deque([] for _ in later)
        self.tiers.rollback()
        return set(spoilt)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, in every tier; refused (False) while any block is in use."""
        if not self.pool.clear():
            return False
        self.tiers.clear()
        return True

    def check(self) -> None:
        """Raise AssertionError if an invariant of the pool or of a tier is broken."""
        self.pool.check()
        self.tiers.check()

    def _on_evict(self, prefix: Prefix, block: int) -> None:
        self.stats.num_evicted_blocks += 1
        self.tiers.on_evict(prefix, block)

    def _find_prefix(self, seq: Sequence) -> list[Prefix]:
        """The longest cached prefix of a sequence, its last token left out."""
        hits: list[Prefix] = []
        if not self.enable_prefix_caching:
            return hits
        parent: Prefix | None = None
        count = (seq.num_tokens - 1) // self.block_size
        self._hash_blocks(seq, count)
        for hash, token_bytes in zip(seq.block_hashes[:count], seq.block_tokens, strict=False):
            prefix = self.pool.find(hash, parent, token_bytes) or self.tiers.find_on_disk(hash, parent, token_bytes)
            if prefix is None:
                break
            hits.append(prefix)
            parent = prefix
        return hits

    def _block_of(self, prefix: Prefix) -> int | None:
        """A block that holds it; of several copies, one that is in use costs no free block."""
        if len(prefix.blocks) > 1:
            return next((block for block in prefix.blocks if self.pool.ref_counts[block]), prefix.blocks[0])
        return prefix.blocks[0] if prefix.blocks else None

    def _tier_of(self, prefix: Prefix, block: int | None) -> Tier:
        if block is not None:
            return Tier.DEVICE
        return Tier.HOST if prefix.host_slot is not None else Tier.DISK

    def _load(self, prefix: Prefix) -> int:
        """A new block, into which the next batch copies a prefix from a lower tier."""
        (block,) = self.pool.allocate(1)
        self.tiers.load(prefix, block)
        self.pool.attach(block, prefix)
        self._unsettled.append(block)
        return block

    def _hash_blocks(self, seq: Sequence, count: int) -> None:
        """See to it that the first `count` full blocks of a sequence are hashed; each is, once in its life."""
        hashes, size = seq.block_hashes, self.block_size
        start = len(hashes)
        if start >= count:
            return
        tokens = array("i", seq.token_ids[start * size : count * size]).tobytes()
        pieces = [tokens[at : at + 4 * size] for at in range(0, len(tokens), 4 * size)]
        if not start:
            pieces[0] = seq.cache_salt + pieces[0]
        hash = hashes[-1] if start else b""
        for piece in pieces:
            hash = self.pool.hash_block(hash, piece)
            hashes.append(hash)
        seq.block_tokens += pieces
