"""BlockPool: the ids of the KV blocks, their reference counts, the LRU free list, and the index of cached prefixes.

It knows tokens and hashes, but no sequences and no tensors. A free block keeps its content and can be hit until it is
allocated again, so "free" means "nobody needs it", not "empty". Empty ones are handed out before any content is evicted.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

import xxhash

from nanoengine.engine.kv.events import AllCleared, BlockRemoved, BlockStored, KVEvent

NULL_BLOCK = 0
"""Never written, never freed: it fills entries of block tables that attention skips."""


class Prefix:
    """One full block of tokens behind one particular prefix, and what of its K/V is where.

    Two Prefix objects are the same prefix only if they are the same object: the chain of parents is compared by
    identity, so a hash collision anywhere in it can never pass for a hit. So that it can be compared, the index keeps a prefix
    as long as it has K/V, or children, or sequences that have come as far as it: a window has no K/V of its beginning.
    """

    __slots__ = ("hash", "is_known", "kv", "num_uses", "parent", "token_bytes", "twin")

    def __init__(self, hash: bytes, parent: Prefix | None, token_bytes: bytes, num_groups: int):
        self.hash = hash
        self.parent = parent
        self.token_bytes = token_bytes
        self.kv: list[PrefixKV | None] = [None] * num_groups  # of each group
        self.num_uses = 0  # groups with K/V of it, children in the index, sequences whose last published block it is
        self.is_known = True  # it is in the index
        self.twin: Prefix | None = None  # another prefix of the same hash, if there ever is one

    @property
    def parent_hash(self) -> bytes:
        return b"" if self.parent is None else self.parent.hash


class PrefixKV:
    """The K/V of a prefix in the layers of one group, wherever it is: in blocks of the pool, or in host memory."""

    __slots__ = ("blocks", "group", "host_filled", "host_slot", "prefix")

    def __init__(self, prefix: Prefix, group: int, blocks: tuple[int, ...] = ()):
        self.prefix = prefix
        self.group = group
        self.blocks = blocks  # the copies in the pool: equal content may have been computed twice
        self.host_slot: int | None = None  # the copy in the host tier
        self.host_filled = False  # whether the plan that makes that copy is committed

    @property
    def can_be_hit(self) -> bool:
        return bool(self.blocks) or self.host_filled


class BlockPool:
    """A fixed number of blocks; block 0 is the null block, the others are handed out and taken back.

    Args:
        num_blocks: usable blocks, the null block not counted.
        num_groups: KV groups that take blocks from it.
        hash_seed: seed of the prefix hashes; random by default, so that nobody can prepare collisions.

    Attributes:
        contents: what each block holds, for those that can be hit.
        uncommitted: block -> whoever has promised to write what it holds; `withdraw` forgets that too.
        events: what enters and leaves the index, since they were last taken; None: nobody listens.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1, hash_seed: int | None = None):
        self.num_blocks = num_blocks
        self.num_groups = num_groups
        self.hash_seed = secrets.randbits(64) if hash_seed is None else hash_seed
        self.ref_counts = [0] * (num_blocks + 1)
        self.contents: list[PrefixKV | None] = [None] * (num_blocks + 1)
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
        """The prefix with these tokens behind this parent, which is in the index, as it is then, too.

        If it is new, it has no K/V: the caller gives it some, or uses it.
        """
        first = prefix = self.index.get(hash)
        while prefix is not None:
            if prefix.parent is parent and prefix.token_bytes == token_bytes:
                return prefix
            prefix = prefix.twin
        prefix = Prefix(hash, parent, token_bytes, self.num_groups)
        prefix.twin = first
        self.index[hash] = prefix
        if parent is not None:
            parent.num_uses += 1
        return prefix

    def kv_of(self, prefix: Prefix, group: int) -> PrefixKV:
        """What there is of a prefix in a group; if there is nothing, the caller puts it somewhere."""
        kv = prefix.kv[group]
        if kv is None:
            kv = prefix.kv[group] = PrefixKV(prefix, group)
            prefix.num_uses += 1
            if self.events is not None:
                self.events.append(_stored(kv))
        return kv

    def attach(self, block: int, prefix: Prefix, group: int) -> None:
        """State that `block` holds the K/V of `prefix` in a group; from now on it can be hit."""
        assert self.contents[block] is None, f"block {block} is published already"
        kv = self.kv_of(prefix, group)
        kv.blocks += (block,)
        self.contents[block] = kv

    def store(
        self, hash: bytes, parent: Prefix | None, token_bytes: bytes, tables: Sequence[Sequence[int]], i: int
    ) -> Prefix:
        """`add`, and `attach` entry i of each group's table, but for the null block. In one, since it is done so often."""
        first = prefix = self.index.get(hash)
        while prefix is not None and (prefix.parent is not parent or prefix.token_bytes != token_bytes):
            prefix = prefix.twin
        if prefix is None:
            prefix = self.index[hash] = Prefix(hash, parent, token_bytes, self.num_groups)
            prefix.twin = first
            if parent is not None:
                parent.num_uses += 1
        kvs = prefix.kv
        for group, table in enumerate(tables):
            block = table[i]
            if block == NULL_BLOCK:
                continue
            if kvs[group] is None and self.events is None:
                kvs[group] = self.contents[block] = PrefixKV(prefix, group, (block,))
                prefix.num_uses += 1
            else:
                self.attach(block, prefix, group)
        return prefix

    def withdraw(self, block: int) -> None:
        """Forget what `block` holds, if anything; other copies of the same content stay."""
        kv = self.contents[block]
        if kv is None:
            return
        self.contents[block] = None
        if self.uncommitted:
            self.uncommitted.pop(block, None)
        if self.ref_counts[block] == 0:
            del self.cached_blocks[block]
            self.empty_blocks.append(block)
        if len(kv.blocks) > 1:
            kv.blocks = tuple(other for other in kv.blocks if other != block)
            return
        kv.blocks = ()
        if kv.host_slot is None:
            self.forget_if_lost(kv)

    def forget_if_lost(self, kv: PrefixKV) -> None:
        """Take what there was of a prefix in a group out of the index, when its last copy is gone."""
        if kv.blocks or kv.host_slot is not None:
            return
        kv.prefix.kv[kv.group] = None
        if self.events is not None:
            self.events.append(BlockRemoved(kv.prefix.hash, kv.group))
        self.leave(kv.prefix)

    def use(self, prefix: Prefix) -> None:
        """Keep a prefix in the index, whatever becomes of its K/V, until `leave`."""
        prefix.num_uses += 1

    def leave(self, prefix: Prefix) -> None:
        """One that used it does not any more. Where nobody else does, it goes, and those before it that are of no use then."""
        at: Prefix | None = prefix
        while at is not None:
            at.num_uses -= 1
            if at.num_uses or not at.is_known:
                return
            self._take_out(at)
            at = at.parent

    def forget(self, prefix: Prefix) -> None:
        """Take a prefix without K/V out of the index. Who has come as far as it, publishes nothing any more."""
        assert not any(prefix.kv)
        if prefix.is_known:
            self._take_out(prefix)
            if prefix.parent is not None:
                self.leave(prefix.parent)

    def _take_out(self, prefix: Prefix) -> None:
        prefix.is_known = False
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
        return [_stored(kv) for prefix in self.parents_first() for kv in prefix.kv if kv is not None]

    def clear(self) -> bool:
        """Forget all cached prefixes; refused (False) while any block is in use."""
        if self.num_free != self.num_blocks:
            return False
        for prefix in self.prefixes():
            prefix.is_known = False
            for kv in filter(None, prefix.kv):
                kv.blocks = ()
            prefix.kv = [None] * self.num_groups
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
            kv = self.contents[block]
            if kv is not None:
                assert block in kv.blocks
                assert kv.prefix.kv[kv.group] is kv
                assert self.find(kv.prefix.hash, kv.prefix.parent, kv.prefix.token_bytes) is kv.prefix
        assert all(self.contents[block] is None for block in self.empty_blocks)
        assert all(self.contents[block] is not None for block in self.cached_blocks)
        assert all(self.contents[block] is not None for block in self.uncommitted)
        assert all(prefix.hash == hash for hash, prefix in self.index.items())
        children = Counter(prefix.parent for prefix in self.prefixes())
        for prefix in self.prefixes():
            assert prefix.is_known
            assert prefix.parent is None or prefix.parent.is_known
            assert prefix.num_uses >= max(1, children[prefix] + sum(kv is not None for kv in prefix.kv))
            assert prefix.twin is None or prefix.twin.hash == prefix.hash
            for group, found in enumerate(prefix.kv):
                if found is not None:
                    assert (found.prefix, found.group) == (prefix, group)
                    assert found.blocks or found.host_slot is not None
                    assert not found.host_filled or found.host_slot is not None
                    assert len(set(found.blocks)) == len(found.blocks)
                    assert all(self.contents[block] is found for block in found.blocks)


def _stored(kv: PrefixKV) -> BlockStored:
    prefix = kv.prefix
    return BlockStored(prefix.hash, prefix.parent_hash, prefix.token_bytes, kv.group)
