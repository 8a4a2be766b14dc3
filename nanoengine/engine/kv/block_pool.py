"""BlockPool: the ids of the KV blocks, their reference counts, the LRU free list, and the index of cached prefixes.

It knows tokens and hashes, but no sequences and no tensors. A free block keeps its content and can be hit until it is
allocated again, so "free" means "nobody needs it", not "empty".
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import xxhash

from nanoengine.engine.kv.events import AllCleared, BlockRemoved, BlockStored, KVEvent

NULL_BLOCK = 0
"""Never written, never freed: it fills entries of block tables that attention skips."""


class Prefix:
    """One full block of tokens behind one particular prefix, wherever its K/V is: in blocks of the pool, or in lower tiers.

    Two Prefix objects are the same prefix only if they are the same object: the chain of parents is compared by
    identity, so a hash collision anywhere in it can never pass for a hit.
    """

    __slots__ = ("blocks", "hash", "host_slot", "on_disk", "parent", "token_bytes", "twin")

    def __init__(self, hash: bytes, parent: Prefix | None, token_bytes: bytes):
        self.hash = hash
        self.parent = parent
        self.token_bytes = token_bytes
        self.blocks: tuple[int, ...] = ()  # the copies in the pool: equal content may have been computed twice
        self.host_slot: int | None = None  # the copy in the host tier
        self.on_disk = False
        self.twin: Prefix | None = None  # another prefix of the same hash, if there ever is one

    @property
    def is_anywhere(self) -> bool:
        """Whether there is a copy in any tier."""
        return bool(self.blocks) or self.host_slot is not None or self.on_disk

    @property
    def parent_hash(self) -> bytes:
        return b"" if self.parent is None else self.parent.hash


class BlockPool:
    """A fixed number of blocks; block 0 is the null block, the others are handed out and taken back.

    Args:
        num_blocks: usable blocks, the null block not counted.
        hash_seed: seed of the prefix hashes; random by default, so that nobody can prepare collisions.

    Attributes:
        on_evict: told of a prefix and the block that holds its last copy in the pool, before that block is taken.
        on_event: told what enters and leaves the index.
    """

    def __init__(self, num_blocks: int, hash_seed: int | None = None):
        self.num_blocks = num_blocks
        self.hash_seed = secrets.randbits(64) if hash_seed is None else hash_seed
        self.ref_counts = [0] * (num_blocks + 1)
        self.contents: list[Prefix | None] = [None] * (num_blocks + 1)
        # Least recently used first. An OrderedDict is a doubly linked list with O(1) removal from the middle.
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self.index: dict[bytes, Prefix] = {}  # hash -> the newest prefix of that hash; its twins behind it
        self.on_evict: Callable[[Prefix, int], None] | None = None
        self.on_event: Callable[[KVEvent], None] | None = None

    @property
    def num_free(self) -> int:
        return len(self.free_blocks)

    @property
    def usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    # ---- reference counts and the free list

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the head of the free list; what they had cached is evicted."""
        assert count <= self.num_free, "the caller checks num_free first"
        take = self.free_blocks.popitem
        blocks = [take(last=False)[0] for _ in range(count)]
        for block in blocks:
            if self.contents[block] is not None:
                self._evict(block)
            self.ref_counts[block] = 1
        return blocks

    def _evict(self, block: int) -> None:
        prefix = self.contents[block]
        assert prefix is not None
        if len(prefix.blocks) == 1 and self.on_evict is not None:
            self.on_evict(prefix, block)
        self.withdraw(block)

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

    def hash_block(self, parent_hash: bytes, token_bytes: bytes) -> bytes:
        """The chained hash: of the prefix before this block (b"" for none), and of its tokens. 128 bits."""
        return xxhash.xxh3_128_digest(parent_hash + token_bytes, seed=self.hash_seed)

    def find(self, hash: bytes, parent: Prefix | None, token_bytes: bytes) -> Prefix | None:
        """The known prefix with these tokens behind this parent, or None. `hash` is that of `hash_block`."""
        prefix = self.index.get(hash)
        while prefix is not None:
            if prefix.parent is parent and prefix.token_bytes == token_bytes:  # compared, not trusted
                return prefix
            prefix = prefix.twin
        return None

    def add(self, hash: bytes, parent: Prefix | None, token_bytes: bytes) -> Prefix:
        """The prefix with these tokens behind this parent; a new one, without any copy yet, if it is not known."""
        prefix = self.find(hash, parent, token_bytes)
        if prefix is None:
            prefix = Prefix(hash, parent, token_bytes)
            self.insert(prefix)
        return prefix

    def insert(self, prefix: Prefix) -> None:
        """Put a new prefix into the index."""
        prefix.twin = self.index.get(prefix.hash)
        self.index[prefix.hash] = prefix
        if self.on_event is not None:
            self.on_event(BlockStored(prefix.hash, prefix.parent_hash, prefix.token_bytes))

    def attach(self, block: int, prefix: Prefix) -> None:
        """State that `block` holds the K/V of `prefix`; from now on it can be hit."""
        assert self.contents[block] is None, f"block {block} is published already"
        prefix.blocks += (block,)
        self.contents[block] = prefix

    def withdraw(self, block: int) -> None:
        """Forget what `block` holds, if anything; other copies of the same content stay."""
        prefix = self.contents[block]
        if prefix is None:
            return
        self.contents[block] = None
        prefix.blocks = tuple(other for other in prefix.blocks if other != block)
        self.forget_if_lost(prefix)

    def forget_if_lost(self, prefix: Prefix) -> None:
        """Take a prefix out of the index when its last copy is gone."""
        if prefix.is_anywhere:
            return
        first = self.index[prefix.hash]
        if first is not prefix:
            while first.twin is not prefix:
                assert first.twin is not None, "it is in the index"
                first = first.twin
            first.twin = prefix.twin
        elif prefix.twin is None:
            del self.index[prefix.hash]
        else:
            self.index[prefix.hash] = prefix.twin
        if self.on_event is not None:
            self.on_event(BlockRemoved(prefix.hash))

    def prefixes(self) -> Iterator[Prefix]:
        """All that the index knows."""
        for first in self.index.values():
            prefix: Prefix | None = first
            while prefix is not None:
                yield prefix
                prefix = prefix.twin

    def clear(self) -> bool:
        """Forget all cached prefixes; refused (False) while any block is in use."""
        if self.num_free != self.num_blocks:
            return False
        for prefix in self.prefixes():
            prefix.blocks = ()
        self.index.clear()
        self.contents = [None] * (self.num_blocks + 1)
        if self.on_event is not None:
            self.on_event(AllCleared())
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
            if prefix is not None:
                assert block in prefix.blocks
                assert self.find(prefix.hash, prefix.parent, prefix.token_bytes) is prefix
        assert all(prefix.hash == hash for hash, prefix in self.index.items())
        for prefix in self.prefixes():
            assert prefix.twin is None or prefix.twin.hash == prefix.hash
            assert prefix.is_anywhere
            assert len(set(prefix.blocks)) == len(prefix.blocks)
            assert all(self.contents[block] is prefix for block in prefix.blocks)
