"""BlockManager: the block tables of sequences. It turns lengths into blocks and prefixes into hits.

Every call that takes blocks either succeeds or leaves the pool exactly as it was.
"""

from __future__ import annotations

from array import array

from nanoengine.engine.block_pool import BlockPool, Prefix
from nanoengine.engine.sequence import Sequence


class BlockManager:
    """Gives blocks of `block_size` tokens to sequences, from one pool.

    Args:
        num_blocks: usable blocks of the pool.
        block_size: tokens per block.
        enable_prefix_caching: find and publish prefixes; without it every block is private.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def admit(self, seq: Sequence) -> int | None:
        """Give a sequence without blocks all that it needs for its tokens and the next one.

        Looking up the prefix and pinning its blocks is one call, so that nothing can evict a hit in between.

        Returns:
            the number of its tokens that are in the cache already, a multiple of the block size and smaller than
            `num_tokens` (the last token is always computed, for its logits); None if the pool lacks blocks.
        """
        assert not seq.block_table
        if self.pool.num_free == 0:  # at least one block is always new: do not look for the others in vain
            return None
        hits = self._find_prefix(seq)
        num_new = self.blocks_for(seq.num_tokens + 1) - len(hits)
        num_revived = sum(self.pool.ref_counts[block] == 0 for block in hits)
        if num_new + num_revived > self.pool.num_free:
            return None
        self.pool.acquire(hits)
        seq.block_table = hits + self.pool.allocate(num_new)
        num_cached = len(hits) * self.block_size
        if seq.num_cached_tokens is None:  # count each request once, not again when it resumes
            self.num_queried_tokens += seq.num_tokens
            self.num_hit_tokens += num_cached
        return num_cached

    def grow(self, seq: Sequence) -> bool:
        """Make room for the K/V of all tokens of a running sequence; False, and nothing changed, if the pool lacks blocks."""
        missing = self.blocks_for(seq.num_tokens) - len(seq.block_table)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        seq.block_table += self.pool.allocate(missing)
        return True

    def publish(self, seq: Sequence, num_new_tokens: int) -> list[int]:
        """Publish the blocks that a step completes when it computes the next `num_new_tokens`; returns those blocks."""
        if not self.enable_prefix_caching:
            return []
        start = seq.num_computed_tokens
        first, last = start // self.block_size, (start + num_new_tokens) // self.block_size
        parent = self.pool.contents[seq.block_table[first - 1]] if first else None
        for i in range(first, last):
            block = seq.block_table[i]
            self.pool.publish(block, parent, self._token_bytes(seq, i))
            parent = self.pool.contents[block]
        return seq.block_table[first:last]

    def withdraw(self, blocks: list[int]) -> None:
        """Take back what a step published, because the step failed. Children first."""
        for block in reversed(blocks):
            self.pool.withdraw(block)

    def free(self, seq: Sequence) -> None:
        """Drop the blocks of a sequence, the tail first: a prefix is worth more than what follows it."""
        self.pool.release(reversed(seq.block_table))
        seq.block_table = []

    def _find_prefix(self, seq: Sequence) -> list[int]:
        """Blocks that hold the longest cached prefix of a sequence, its last token left out."""
        hits: list[int] = []
        if not self.enable_prefix_caching:
            return hits
        prefix: Prefix | None = None
        for i in range((seq.num_tokens - 1) // self.block_size):
            prefix = self.pool.find(prefix, self._token_bytes(seq, i))
            if prefix is None:
                break
            # Of several copies, one that is in use costs no free block.
            hits.append(next((block for block in prefix.blocks if self.pool.ref_counts[block]), prefix.blocks[0]))
        return hits

    def _token_bytes(self, seq: Sequence, block_index: int) -> bytes:
        start = block_index * self.block_size
        return array("i", seq.token_ids[start : start + self.block_size]).tobytes()
