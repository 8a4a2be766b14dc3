"""BlockManager: the block tables of sequences. It turns lengths into blocks, prefixes into hits, and forks into shared blocks.

A table only grows: whatever else changes one makes a new list of it. Every call that takes blocks either succeeds or leaves
tables, counts and the free list exactly as they were.
"""

from __future__ import annotations

from typing import NamedTuple

from nanoengine.engine.kv.block_pool import NULL_BLOCK, Prefix
from nanoengine.engine.kv.prefix_cache import PrefixCache
from nanoengine.engine.messages import Place, Tier, Transfer
from nanoengine.engine.sequence import Sequence


class Growth(NamedTuple):
    """What became of a block table."""

    new: list[int]  # blocks at its end
    replaced: tuple[int, int] | None  # (index, block): a shared block was copied before it is written to


class BlockManager(PrefixCache):
    """Gives blocks of `block_size` tokens to sequences, from one pool; those of a cached prefix to all that begin with it."""

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # ---- slots

    def admit(self, seq: Sequence) -> int | None:
        """Give a sequence without blocks all that it needs for its tokens and the next one: the whole sequence must fit.

        Looking up the prefix and pinning its blocks is one call, so that nothing can evict a hit in between. Blocks that
        only host memory has are copied back by the plan.

        Returns:
            the number of its tokens that need not be computed, a multiple of the block size and smaller than `num_tokens`
            (the last token is always computed, for its logits); None if the pool lacks blocks.
        """
        assert not seq.block_table
        pool = self.pool
        if pool.num_free == 0:  # at least one block is always new: do not look for the others in vain
            return None
        looks_up = self._looks_up(seq)
        hits = self._find_prefix(seq, self._num_cacheable(seq)) if looks_up else []
        held = [self._block_of(prefix) for prefix in hits]
        on_device = [block for block in held if block is not None]
        num_new = self.blocks_for(seq.num_tokens + 1) - len(on_device)
        num_revived = sum(pool.ref_counts[block] == 0 for block in on_device)
        if num_new + num_revived > pool.num_free:
            return None
        pool.acquire(on_device)
        self.tiers.touch(self._plan, hits, held)
        new = self._allocate(num_new)
        fetched = None if self._reads is None else self._reads.end(seq)
        table, num_loaded = [], 0
        for prefix, block in zip(hits, held, strict=True):
            tier = Tier.DEVICE
            if block is None:
                block = new[num_loaded]
                num_loaded += 1
                self._load(seq, prefix, block)
                tier = Tier.DISK if fetched is not None and prefix.hash in fetched.reads else Tier.HOST
            table.append(block)
            self.stats.hits_by_tier[tier] += self.block_size
        seq.block_table = table + new[num_loaded:]
        seq.num_slots = len(seq.block_table) * self.block_size
        seq.num_published = len(hits)
        num_cached = len(hits) * self.block_size
        if looks_up:
            self.stats.record(seq.num_tokens, num_cached, resumed=seq.num_cached_tokens is not None)
        return num_cached

    def allocate_slots(self, seq: Sequence, num_lookahead: int = 0) -> Growth | None:
        """Make room, in blocks of its own, for the K/V of all tokens of a running sequence and some that may follow.

        A block that it shares and is about to write to is copied first. Blocks that are complete by now are published;
        lookahead slots never are, before their tokens are accepted and computed.

        Returns:
            what changed in its table; None, and nothing changed, if the pool lacks blocks.
        """
        pool, table, size = self.pool, seq.block_table, self.block_size
        num_computed = seq.num_computed_tokens
        if num_computed == len(table) * size and pool.empty_blocks and not (num_lookahead or self._spoilt):
            # By far the most frequent case, so it has a way of its own: the next token begins a block.
            self.publish(seq, min(num_computed, len(seq.token_ids) - 1))
            block = pool.take_empty()
            table.append(block)
            seq.num_slots = num_computed + size
            return Growth([block], None)
        missing = -(-(seq.num_tokens + num_lookahead) // size) - len(table)
        if missing < 0:
            missing = 0
        tail = num_computed // size  # the block that is written next
        is_shared = tail < len(table) and pool.ref_counts[table[tail]] > 1
        if missing + is_shared > len(pool.empty_blocks) + len(pool.cached_blocks):
            return None
        self.publish(seq, seq.num_written_tokens)
        replaced = self._copy_on_write(seq, tail) if is_shared else None
        new = self._allocate(missing)
        seq.block_table += new
        seq.num_slots = len(seq.block_table) * size
        return Growth(new, replaced)

    def trim(self, seq: Sequence) -> None:
        """Take back the blocks of lookahead slots that no token came to need."""
        keep = self.blocks_for(seq.num_tokens)
        self.pool.release(reversed(seq.block_table[keep:]))
        seq.block_table = seq.block_table[:keep]
        seq.num_slots = min(seq.num_slots, keep * self.block_size)

    def free(self, seq: Sequence) -> None:
        """Publish what a sequence has written, and drop its blocks. It may have none."""
        if seq.block_table:
            self.publish(seq, seq.num_written_tokens)
        self.discard(seq)

    def discard(self, seq: Sequence, *, wipe: bool = False) -> None:
        """Drop the blocks of a sequence, the tail first: a prefix is worth more than what follows it.

        Args:
            wipe: they may hold what is no number. Those that nobody can find any more are overwritten with the null block before
                they are used again, since there are kernels that multiply what nobody wrote by 0.
        """
        self.cancel_fetch(seq)
        self.pool.release(reversed(seq.block_table))
        if wipe:
            pool = self.pool
            self._spoilt |= {b for b in seq.block_table if not pool.ref_counts[b] and pool.contents[b] is None}
        seq.block_table = []
        seq.num_slots = seq.num_published = 0

    def condemn(self, seq: Sequence) -> None:
        """Drop the blocks of a sequence whose K/V may be wrong: no tier has its prefix any more, nor what follows from that.

        It may have been preempted, or have ended, since a plan computed it.
        """
        prefixes = [prefix for hash in seq.block_hashes for prefix in self.pool.of_hash(hash)]
        self.tiers.withdraw(self._plan, self.pool.behind(prefixes), seq.block_hashes)
        if self._reads is not None:
            self._reads.forget_dropped()
        self.discard(seq, wipe=True)

    def swap_out(self, seq: Sequence) -> None:
        """`free`, with the complete blocks copied to host memory first, as many as it has room for."""
        self.publish(seq, seq.num_written_tokens)
        room = 0 if self.tiers.host is None else self.tiers.host.num_slots
        for block in reversed(seq.block_table[: min(seq.num_published, room)]):  # the beginning is pushed out last
            prefix = self.pool.contents[block]
            if prefix is not None:
                self.tiers.save(self._plan, prefix, block)
        self.discard(seq)

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

    def _block_of(self, prefix: Prefix) -> int | None:
        """A block that holds it; of several copies, one that is in use costs no free block."""
        if len(prefix.blocks) > 1:
            return next((block for block in prefix.blocks if self.pool.ref_counts[block]), prefix.blocks[0])
        return prefix.blocks[0] if prefix.blocks else None

    def _load(self, seq: Sequence, prefix: Prefix, block: int) -> None:
        """Let the plan copy a prefix from host memory into a new block."""
        self.tiers.load(self._plan, prefix, block)
        self.pool.attach(block, prefix)
        self.pool.uncommitted[block] = self._plan
        self._plan.published.append((seq, block, prefix))

    # ---- forks

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a sequence without blocks share all those of another, the half-full last one too.

        `child` has the parent's tokens, at least those that are computed. The first to write into a shared block gets a copy.
        """
        assert not child.block_table
        self.cancel_fetch(child)
        assert child.num_computed_tokens >= parent.num_computed_tokens, "it writes nothing that the parent has written"
        self.publish(parent, parent.num_written_tokens)
        child.block_table = parent.block_table[: self.blocks_for(child.num_computed_tokens)]
        self.pool.acquire(child.block_table)
        child.num_published = min(parent.num_published, len(child.block_table))
        child.block_hashes = parent.block_hashes[: child.num_published]
        child.block_tokens = parent.block_tokens[: child.num_published]
        parent.num_slots = child.num_slots = 0  # before either writes again, `allocate_slots` looks for shared blocks
        self._plan.forks.append((parent, child))

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
        self._plan.forks += zip(parents, seqs, strict=True)

    def _copy_on_write(self, seq: Sequence, index: int) -> tuple[int, int]:
        shared = seq.block_table[index]
        (own,) = self._allocate(1)
        self._plan.transfers.append(Transfer(Place(Tier.DEVICE, shared), Place(Tier.DEVICE, own)))
        self.pool.release([shared])
        seq.block_table = [*seq.block_table[:index], own, *seq.block_table[index + 1 :]]
        self.stats.num_copied_blocks += 1
        return index, own
