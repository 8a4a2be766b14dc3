"""BlockPool: the ids of the KV blocks, their reference counts, the LRU free list, and the index of cached prefixes.

It knows tokens and hashes, but no sequences and no tensors. A free block keeps its content and can be hit until it is
allocated again, so "free" means "nobody needs it", not "empty".
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable

import xxhash

NULL_BLOCK = 0
"""Never written, never freed: it fills entries of block tables that attention skips."""


class Prefix:
    """One full block of tokens behind one particular prefix: what a published block holds.

    Two Prefix objects are the same prefix only if they are the same object: the chain of parents is compared by
    identity, so a hash collision anywhere in it can never pass for a hit.
    """

    __slots__ = ("blocks", "hash", "parent", "token_bytes")

    def __init__(self, hash: bytes, parent: Prefix | None, token_bytes: bytes):
        self.hash = hash
        self.parent = parent
        self.token_bytes = token_bytes
        self.blocks: list[int] = []  # the copies in the pool: equal content may have been computed twice


class BlockPool:
    """A fixed number of blocks; block 0 is the null block, the others are handed out and taken back.

    Args:
        num_blocks: usable blocks, the null block not counted.
        hash_seed: seed of the prefix hashes; random by default, so that nobody can prepare collisions.
    """

    def __init__(self, num_blocks: int, hash_seed: int | None = None):
        self.num_blocks = num_blocks
        self.hash_seed = secrets.randbits(64) if hash_seed is None else hash_seed
        self.ref_counts = [0] * (num_blocks + 1)
        self.contents: list[Prefix | None] = [None] * (num_blocks + 1)
        # Least recently used first. An OrderedDict is a doubly linked list with O(1) removal from the middle.
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self.index: dict[bytes, list[Prefix]] = {}

    @property
    def num_free(self) -> int:
        return len(self.free_blocks)

    @property
    def usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    # ---- reference counts and the free list

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the head of the free list; what they had cached is forgotten."""
        assert count <= self.num_free, "the caller checks num_free first"
        blocks = [self.free_blocks.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.withdraw(block)
            self.ref_counts[block] = 1
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; a free one leaves the free list."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.free_blocks[block]
            self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each block, in this order; the last one sends it to the tail of the free list."""
        for block in blocks:
            if self.ref_counts[block] <= 0:
                raise RuntimeError(f"block {block} is released more often than it was taken")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_blocks[block] = None

    # ---- the index of cached prefixes

    def hash_block(self, parent: Prefix | None, token_bytes: bytes) -> bytes:
        """The chained hash: of the prefix before this block, and of its tokens. 128 bits."""
        return xxhash.xxh3_128_digest((parent.hash if parent else b"") + token_bytes, seed=self.hash_seed)

    def find(self, parent: Prefix | None, token_bytes: bytes) -> Prefix | None:
        """The cached prefix with these tokens behind this parent, or None."""
        return self._find(self.hash_block(parent, token_bytes), parent, token_bytes)

    def _find(self, hash: bytes, parent: Prefix | None, token_bytes: bytes) -> Prefix | None:
        for prefix in self.index.get(hash, ()):
            if prefix.parent is parent and prefix.token_bytes == token_bytes:  # compared, not trusted
                return prefix
        return None

    def publish(self, block: int, parent: Prefix | None, token_bytes: bytes) -> None:
        """State that `block` holds these tokens behind `parent`; from now on it can be hit."""
        assert self.contents[block] is None, f"block {block} is published already"
        hash = self.hash_block(parent, token_bytes)
        prefix = self._find(hash, parent, token_bytes)
        if prefix is None:
            prefix = Prefix(hash, parent, token_bytes)
            self.index.setdefault(hash, []).append(prefix)
        prefix.blocks.append(block)
        self.contents[block] = prefix

    def withdraw(self, block: int) -> None:
        """Forget what `block` holds, if anything; other copies of the same content stay."""
        prefix = self.contents[block]
        if prefix is None:
            return
        self.contents[block] = None
        prefix.blocks.remove(block)
        if not prefix.blocks:
            same_hash = self.index[prefix.hash]
            same_hash.remove(prefix)
            if not same_hash:
                del self.index[prefix.hash]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; refused (False) while any block is in use."""
        if self.num_free != self.num_blocks:
            return False
        self.index.clear()
        self.contents = [None] * (self.num_blocks + 1)
        return True

    def check(self) -> None:
        """Raise AssertionError if an invariant of the pool is broken."""
        assert self.ref_counts[NULL_BLOCK] == 0
        assert self.contents[NULL_BLOCK] is None
        assert NULL_BLOCK not in self.free_blocks
        for block in range(1, self.num_blocks + 1):
            assert self.ref_counts[block] >= 0
            assert (block in self.free_blocks) == (self.ref_counts[block] == 0), (
                f"block {block}: free list and count differ"
            )
            prefix = self.contents[block]
            assert prefix is None or (block in prefix.blocks and prefix in self.index.get(prefix.hash, ()))
        for hash, prefixes in self.index.items():
            assert prefixes
            for prefix in prefixes:
                assert prefix.hash == hash
                assert prefix.blocks
                assert len(set(prefix.blocks)) == len(prefix.blocks)
                assert all(self.contents[block] is prefix for block in prefix.blocks)
