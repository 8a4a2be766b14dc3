"""BlockPool: the ids of the KV blocks, their reference counts, the LRU free list, and the index of cached prefixes.

It knows tokens and hashes, but no sequences and no tensors. A free block keeps its content and can be hit until it is
allocated again, so "free" means "nobody needs it", not "empty". Empty ones are handed out before any content is evicted.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from itertools import islice

import xxhash

from nanoengine.engine.kv.events import AllCleared, BlockRemoved, BlockStored, KVEvent

NULL_BLOCK = 0
"""Never written, never freed: it fills entries of block tables that attention skips."""


class Prefix:
    """One full block of tokens behind one particular prefix, wherever its K/V is: in blocks of the pool, or in host memory.

    Two Prefix objects are the same prefix only if they are the same object: the chain of parents is compared by
    identity, so a hash collision anywhere in it can never pass for a hit.
    """

    __slots__ = ("blocks", "hash", "host_filled", "host_slot", "parent", "token_bytes", "twin")

    def __init__(self, hash: bytes, parent: Prefix | None, token_bytes: bytes):
        self.hash = hash
        self.parent = parent
        self.token_bytes = token_bytes
        self.blocks: tuple[int, ...] = ()  # the copies in the pool: equal content may have been computed twice
        self.host_slot: int | None = None  # the copy in the host tier
        self.host_filled = False  # whether the plan that makes that copy is committed
        self.twin: Prefix | None = None  # another prefix of the same hash, if there ever is one

    @property
    def is_anywhere(self) -> bool:
        """Whether there is a copy, or one on its way."""
        return bool(self.blocks) or self.host_slot is not None

    @property
    def can_be_hit(self) -> bool:
        return bool(self.blocks) or self.host_filled

    @property
    def parent_hash(self) -> bytes:
        return b"" if self.parent is None else self.parent.hash


class BlockPool:
    """A fixed number of blocks; block 0 is the null block, the others are handed out and taken back.

    Args:
        num_blocks: usable blocks, the null block not counted.
        hash_seed: seed of the prefix hashes; random by default, so that nobody can prepare collisions.

    Attributes:
        contents: what each block holds, for those that can be hit.
        uncommitted: block -> whoever has promised to write what it holds; `withdraw` forgets that too.
        events: what enters and leaves the index, since they were last taken; None: nobody listens.
    """

    def __init__(self, num_blocks: int, hash_seed: int | None = None):
        self.num_blocks = num_blocks
        self.hash_seed = secrets.randbits(64) if hash_seed is None else hash_seed
        self.ref_counts = [0] * (num_blocks + 1)
        self.contents: list[Prefix | None] = [None] * (num_blocks + 1)
        self.uncommitted: dict[int, object] = {}
        # Free blocks: the empty ones, to be taken from the end; then those with content, least recently used first.
        # An OrderedDict is a doubly linked list with O(1) removal from the middle.
        self.empty_blocks = list(range(num_blocks, 0, -1))
        self.cached_blocks: OrderedDict[int, None] = OrderedDict()
        self.index: dict[bytes, Prefix] = {}  # hash -> the newest prefix of that hash; its twins behind it
        self.events: list[KVEvent] | None = None

    @property
    def num_free(self) -> int:
        return len(self.empty_blocks) + len(self.cached_blocks)

    @property
    def usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    @property
    def free_blocks(self) -> list[int]:
        """All free blocks, in the order in which they are handed out."""
        return [*reversed(self.empty_blocks), *self.cached_blocks]

    # ---- reference counts and the free list

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the head of the free list; what they had cached is evicted."""
        assert count <= self.num_free, "the caller checks num_free first"
        empty, counts = self.empty_blocks, self.ref_counts
        if count == 1 and empty:
            counts[empty[-1]] = 1
            return [empty.pop()]
        blocks = [empty.pop() for _ in range(min(count, len(empty)))]
        for block in self.next_evicted(count - len(blocks)):
            self.withdraw(block)
            blocks.append(empty.pop())
        for block in blocks:
            counts[block] = 1
        return blocks

    def take_empty(self) -> int:
        """Take one of the blocks that hold nothing; the caller sees to it that there is one."""
        block = self.empty_blocks.pop()
        self.ref_counts[block] = 1
        return block

    def next_evicted(self, count: int) -> list[int]:
        """Whose content is lost if `count` blocks are allocated now, the first first."""
        missing = count - len(self.empty_blocks)
        return list(islice(self.cached_blocks, missing)) if missing > 0 else []

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block. A free one, which leaves the free list, has content: empty ones are allocated."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.cached_blocks[block]
            self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each block, in this order. The last one sends it to the tail of the free list, or, if it holds
        nothing, to its head.
        """
        counts, contents = self.ref_counts, self.contents
        for block in blocks:
            count = counts[block]
            if count <= 0:
                raise RuntimeError(f"block {block} is released more often than it was taken")
            counts[block] = count - 1
            if count == 1:
                if contents[block] is None:
                    self.empty_blocks.append(block)
                else:
                    self.cached_blocks[block] = None

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
        if self.events is not None:
            self.events.append(_stored(prefix))

    def store(self, block: int, hash: bytes, parent: Prefix | None, token_bytes: bytes) -> Prefix:
        """`add` and `attach` in one: `block` holds the K/V of these tokens behind this parent."""
        first = self.index.get(hash)
        prefix = first
        while prefix is not None and (prefix.parent is not parent or prefix.token_bytes != token_bytes):
            prefix = prefix.twin
        if prefix is None:
            prefix = Prefix(hash, parent, token_bytes)
            prefix.twin = first
            self.index[hash] = prefix
            if self.events is not None:
                self.events.append(_stored(prefix))
        assert self.contents[block] is None, f"block {block} is published already"
        prefix.blocks += (block,)
        self.contents[block] = prefix
        return prefix

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
        if self.uncommitted:
            self.uncommitted.pop(block, None)
        if self.ref_counts[block] == 0:
            del self.cached_blocks[block]
            self.empty_blocks.append(block)
        if len(prefix.blocks) == 1:
            prefix.blocks = ()
        else:
            prefix.blocks = tuple(other for other in prefix.blocks if other != block)
        self.forget_if_lost(prefix)

    def forget_if_lost(self, prefix: Prefix) -> None:
        """Take a prefix out of the index when its last copy is gone."""
        if prefix.blocks or prefix.host_slot is not None:
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
        if self.events is not None:
            self.events.append(BlockRemoved(prefix.hash))

    def of_hash(self, hash: bytes) -> Iterator[Prefix]:
        """All prefixes of this hash: hardly ever more than one."""
        prefix = self.index.get(hash)
        while prefix is not None:
            yield prefix
            prefix = prefix.twin

    def prefixes(self) -> Iterator[Prefix]:
        """All that the index knows."""
        for hash in self.index:
            yield from self.of_hash(hash)

    def parents_first(self) -> list[Prefix]:
        """All that the index knows, each behind its parent."""
        ordered: dict[Prefix, None] = {}
        known = dict.fromkeys(self.prefixes())
        for prefix in known:
            chain: list[Prefix] = []
            ancestor: Prefix | None = prefix
            while ancestor is not None and ancestor in known and ancestor not in ordered:
                chain.append(ancestor)
                ancestor = ancestor.parent
            ordered.update(dict.fromkeys(reversed(chain)))
        return list(ordered)

    def behind(self, roots: Collection[Prefix]) -> list[Prefix]:
        """What the index knows of some prefixes and of all that have one of them among their ancestors, children first."""
        found, others = set(roots), set[Prefix]()
        for prefix in self.prefixes():
            chain: list[Prefix] = []
            ancestor: Prefix | None = prefix
            while ancestor is not None and ancestor not in found and ancestor not in others:
                chain.append(ancestor)
                ancestor = ancestor.parent
            (others if ancestor is None or ancestor in others else found).update(chain)
        return [prefix for prefix in reversed(self.parents_first()) if prefix in found]

    def stored(self) -> list[BlockStored]:
        """The events that tell a new listener what can be hit, parents first."""
        return [_stored(prefix) for prefix in self.parents_first()]

    def clear(self) -> bool:
        """Forget all cached prefixes; refused (False) while any block is in use."""
        if self.num_free != self.num_blocks:
            return False
        for prefix in self.prefixes():
            prefix.blocks = ()
        self.index.clear()
        self.contents = [None] * (self.num_blocks + 1)
        self.uncommitted.clear()
        self.empty_blocks = self.free_blocks[::-1]
        self.cached_blocks.clear()
        if self.events is not None:
            self.events.append(AllCleared())
        return True

    def check(self) -> None:
        """Raise AssertionError if an invariant of the pool is broken."""
        assert self.ref_counts[NULL_BLOCK] == 0
        assert self.contents[NULL_BLOCK] is None
        free = self.free_blocks
        assert len(set(free)) == len(free)
        assert NULL_BLOCK not in free
        is_free = set(free)
        for block in range(1, self.num_blocks + 1):
            assert self.ref_counts[block] >= 0
            assert (block in is_free) == (self.ref_counts[block] == 0), f"block {block}: free list and count differ"
            prefix = self.contents[block]
            if prefix is not None:
                assert block in prefix.blocks
                assert self.find(prefix.hash, prefix.parent, prefix.token_bytes) is prefix
        assert all(self.contents[block] is None for block in self.empty_blocks)
        assert all(self.contents[block] is not None for block in self.cached_blocks)
        assert all(self.contents[block] is not None for block in self.uncommitted)
        assert all(prefix.hash == hash for hash, prefix in self.index.items())
        for prefix in self.prefixes():
            assert prefix.twin is None or prefix.twin.hash == prefix.hash
            assert prefix.is_anywhere
            assert not prefix.host_filled or prefix.host_slot is not None
            assert len(set(prefix.blocks)) == len(prefix.blocks)
            assert all(self.contents[block] is prefix for block in prefix.blocks)


def _stored(prefix: Prefix) -> BlockStored:
    return BlockStored(prefix.hash, prefix.parent_hash, prefix.token_bytes)
