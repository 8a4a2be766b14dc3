"""BlockManager: block tables of sequences in the KV pool, reference counts, and the prefix cache."""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import NamedTuple

import xxhash

from nanoengine.core.messages import NULL_BLOCK, Entries
from nanoengine.core.seams import Faults, KVLayout, KVStore, call_part
from nanoengine.core.sequence import Sequence


class Cached(NamedTuple):
    """The full block of a prefix that a block of the pool holds."""

    group: int
    hash: bytes
    tokens: bytes


class BlockManager:
    """Reference counts, an LRU list of free blocks, and an index from the hash of a prefix to the block that holds its end.

    A free block keeps its K/V until it is allocated again. Hashes are chained (each covers all tokens before it), 128 bits
    wide, and seeded with a secret; a hit also compares the tokens of every block, so no request can read the K/V of other
    tokens. A block is in the index when the step that computed it was committed. A call allocates all blocks that it
    needs, or none.

    Args:
        num_blocks: usable blocks; block 0 is one more, the null block.
        block_size: tokens of a block.
        layouts: one for each KV group, the layers with common block tables.
        stores: caches of blocks outside the pool. Exceptions of a store are logged, and count as misses.
        enable_prefix_caching: False: hits only within one request, such as of a sequence that resumes.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        layouts: Seq[KVLayout] = (KVLayout(),),
        stores: Seq[KVStore] = (),
        *,
        enable_prefix_caching: bool = True,
    ):
        self.num_blocks, self.block_size, self.layouts, self.stores = num_blocks, block_size, layouts, stores
        self.enable_prefix_caching = enable_prefix_caching
        self.seed = secrets.randbits(64)  # of the hashes
        self.ref_counts = [0] * (num_blocks + 1)
        self.free_blocks = OrderedDict.fromkeys(range(1, num_blocks + 1))  # least recently used first
        self.contents: list[Cached | None] = [None] * (num_blocks + 1)
        self.index: list[dict[bytes, int]] = [{} for _ in layouts]  # of each group: hash -> block
        # Hash of a block that a running sequence computes or loads -> the first such sequence.
        self.pending: dict[bytes, Sequence] = {}
        self.dirty: set[int] = set()  # blocks that may hold NaN
        self.zeroed: list[int] = []  # such blocks that were allocated: the next step overwrites them first

    @property
    def num_free(self) -> int:
        return len(self.free_blocks)

    # ---- blocks of sequences

    def admit(self, seq: Sequence, num_cached_blocks: int, faults: Faults) -> bool:
        """Allocate the blocks of a sequence: cached prefix, other tokens and the next one. `faults`: of stores."""
        size, cached = self.block_size, num_cached_blocks * self.block_size
        hashes, num_new = seq.block_hashes, 0
        tables: list[list[int]] = []
        firsts: list[int] = []  # of each table: index of the first block in the window
        ends: list[int] = []
        pinned: list[int] = []
        loads: list[tuple[int, int]] = []  # (group, index) of blocks in stores
        for group, layout in enumerate(self.layouts):
            first = layout.first_visible(cached) // size
            held = [self.index[group].get(hash, NULL_BLOCK) for hash, _ in hashes[first:num_cached_blocks]]
            pinned += filter(None, held)
            loads += [(group, index) for index, block in enumerate(held, first) if block == NULL_BLOCK]
            ends.append(self._blocks_for(layout.reserve(cached, seq.num_tokens + 1)))
            num_new += held.count(NULL_BLOCK) + ends[-1] - num_cached_blocks
            firsts.append(first)
            tables.append([NULL_BLOCK] * first + held)
        if num_new + sum(not self.ref_counts[block] for block in pinned) > self.num_free:
            return False
        for block in pinned:
            self.ref_counts[block] += 1
            self.free_blocks.pop(block, None)
        lost = self.call_stores("hold", hashes[:num_cached_blocks])  # the evictions below must not drop these blocks
        for group, index in loads:
            self.pending.setdefault(hashes[index][0], seq)
            tables[group][index] = self._allocate()
            call_part(lost, self, "_load", None, group, *hashes[index], tables[group][index])
        admitted = SimpleNamespace(concerns={seq}.__contains__)  # no other sequence must end
        faults += [(admitted, error) for _, error in lost]
        for table, end in zip(tables, ends, strict=True):
            table += [self._allocate() for _ in range(end - len(table))]
        seq.block_tables, seq.first_blocks = tables, firsts
        seq.num_computed = seq.num_written = cached
        self._count_slots(seq)
        return True

    def grow(self, seq: Sequence, num_tokens: int, changes: list[Entries]) -> bool:
        """Allocate blocks for the first `num_tokens` tokens of a running sequence; blocks outside the windows of its next tokens
        are released.

        Args:
            changes: of its block tables; appended.

        Returns:
            False, and nothing changed, if there are not enough blocks.
        """
        end, num_new, num_freed = self._blocks_for(num_tokens), 0, 0
        dead: list[tuple[int, list[int]]] = []  # (group, blocks)
        for group, (layout, table) in enumerate(zip(self.layouts, seq.block_tables, strict=True)):
            num_new += max(0, end - len(table))
            if not layout.forgets:
                continue
            if blocks := table[seq.first_blocks[group] : layout.first_visible(seq.num_written) // self.block_size]:
                num_freed += sum(self.ref_counts[block] == 1 for block in blocks)
                dead.append((group, blocks))
        if num_new > self.num_free + num_freed:
            return False
        for group, blocks in dead:
            first, nulls = seq.first_blocks[group], [NULL_BLOCK] * len(blocks)
            seq.first_blocks[group] += len(blocks)
            seq.block_tables[group][first : first + len(blocks)] = nulls
            changes.append(Entries(seq.row, group, first, nulls))
            self._release(blocks)
        for group, table in enumerate(seq.block_tables):
            if end > len(table):
                new = [self._allocate() for _ in range(end - len(table))]
                changes.append(Entries(seq.row, group, len(table), new))
                table += new
        self._count_slots(seq)
        return True

    def release(self, seq: Sequence) -> None:
        """Release all blocks of a sequence, the last first: another hit of the beginning is likelier."""
        for table, first in zip(seq.block_tables, seq.first_blocks, strict=True):
            self._release(table[first:])
        seq.block_tables, seq.first_blocks = [], []
        seq.num_published = seq.num_written = seq.num_slots = seq.num_computed = 0
        if self.pending:
            self.pending = {hash: by for hash, by in self.pending.items() if by is not seq}

    def _release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_blocks[block] = None
                if self.contents[block] is None:  # no hit is possible: it is allocated next
                    self.free_blocks.move_to_end(block, last=False)

    def _allocate(self) -> int:
        block, _ = self.free_blocks.popitem(last=False)
        if (cached := self.contents[block]) is not None:
            self._unpublish(block)
            self.call_stores("evicted", cached.group, cached.hash, cached.tokens, block)
        if block in self.dirty:
            self.dirty.remove(block)
            self.zeroed.append(block)
        self.ref_counts[block] = 1
        return block

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _count_slots(self, seq: Sequence) -> None:
        """Set the number of tokens that a sequence can compute in its blocks. Its last possible token is never computed."""
        seq.num_slots = min(min(map(len, seq.block_tables)) * self.block_size, seq.max_num_tokens - 1)

    # ---- the prefix cache

    def find(self, seq: Sequence) -> int | None:
        """Blocks of the longest cached prefix of a waiting sequence. None: wait, another will publish more (`seq.waits_for`)."""
        hashes = self.hit_hashes(seq)
        pending = [hash for hash, _ in hashes if hash in self.pending] if self.pending else []
        # A block is published after all blocks before it.
        seq.waits_for = next((hash for hash in pending[::-1] if any(hash not in each for each in self.index)), None)
        return self.longest_hit(hashes, self.has) if seq.waits_for is None else None

    def hit_hashes(self, seq: Sequence) -> list[tuple[bytes, bytes]]:
        """(hash, tokens) of the blocks of a possible hit."""
        return self._hashes(seq)[: (seq.num_tokens - 1) // self.block_size] if seq.reads_cache else []

    def longest_hit(self, hashes: list[tuple[bytes, bytes]], has: Callable[[int, bytes, bytes], bool]) -> int:
        """Length in blocks of the longest cached prefix behind which every group has all blocks in the window of the next token.

        Args:
            has: whether a group has a block: (group, hash, tokens).
        """
        size, count = self.block_size, len(hashes)
        windows = [(group, layout) for group, layout in enumerate(self.layouts) if layout.forgets]
        for group, layout in enumerate(self.layouts):
            if not layout.forgets:
                count = next((i for i in range(count) if not has(group, *hashes[i])), count)
        while count:
            visible = ((group, range(layout.first_visible(count * size) // size, count)) for group, layout in windows)
            missing = (i for group, indices in visible for i in reversed(indices) if not has(group, *hashes[i]))
            if (index := next(missing, None)) is not None:
                count = index  # a start behind this block has it in its window
            elif all(call_part([], store, "may_end", False, *hashes[count - 1], has) for store in self.stores):
                break
            else:
                count -= 1
        return count

    def begin(self, seq: Sequence) -> None:
        """Mark the full blocks of a sequence as pending, which its next steps compute: other sequences wait for them."""
        for hash, _ in self._hashes(seq)[seq.num_computed // self.block_size :]:
            self.pending.setdefault(hash, seq)

    def publish(self, seq: Sequence, num_written: int) -> None:
        """Add the full blocks of a sequence to the prefix cache, of which `num_written` tokens have their K/V."""
        seq.num_written = num_written
        first, last = seq.num_published, num_written // self.block_size
        if last <= first:
            return
        hashes = self._hashes(seq)
        for i in range(first, last):
            hash, tokens = hashes[i]
            for group, table in enumerate(seq.block_tables):
                block = table[i]
                if block != NULL_BLOCK and self.contents[block] is None and hash not in self.index[group]:
                    self.index[group][hash], self.contents[block] = block, Cached(group, hash, tokens)
                    self.dirty.discard(block)  # all of it was written
                    self.call_stores("cached", group, hash, hashes[i - 1][0] if i else b"", tokens, block)
            if self.pending:
                self.pending.pop(hash, None)
        seq.num_published = last

    def invalidate(self, seq: Sequence) -> None:
        """Remove the blocks of a sequence, whose K/V may be wrong, from the prefix cache and stores; they are zeroed later."""
        for hash, tokens in seq.block_hashes:
            for group, index in enumerate(self.index):
                if (block := index.get(hash)) is not None:
                    self._unpublish(block)
                    self.dirty.add(block)
                self.call_stores("invalidated", group, hash, tokens)
        self.mark_dirty(seq)

    def mark_dirty(self, seq: Sequence) -> None:
        """Mark the unpublished blocks of a sequence, which may hold NaN: they are zeroed before their next use."""
        for table in seq.block_tables:
            self.dirty.update(block for block in table if block != NULL_BLOCK and self.contents[block] is None)

    def reset(self) -> bool:
        """Empty the prefix cache and all stores; refused (False) while a sequence has blocks."""
        if self.num_free < self.num_blocks:
            return False
        for index in self.index:
            for block in list(index.values()):
                self._unpublish(block)
        self.call_stores("clear")
        return True

    def call_stores(self, method: str, *args: object) -> Faults:
        """Call a method of all stores; returns the stores that raised."""
        faults: Faults = []
        for store in self.stores:
            call_part(faults, store, method, None, *args)
        return faults

    def _load(self, group: int, hash: bytes, tokens: bytes, block: int) -> None:
        next(store for store in self.stores if store.has(group, hash, tokens)).load(group, hash, tokens, block)

    def _unpublish(self, block: int) -> None:
        cached = self.contents[block]
        assert cached is not None
        self.contents[block] = None
        del self.index[cached.group][cached.hash]

    def has(self, group: int, hash: bytes, tokens: bytes) -> bool:
        """Whether the pool or a store has a block."""
        block = self.index[group].get(hash) if group < len(self.index) else None  # stores may have further groups
        if block is not None:
            cached = self.contents[block]
            return cached is not None and cached.tokens == tokens
        return any(call_part([], store, "has", False, group, hash, tokens) for store in self.stores)

    def _hashes(self, seq: Sequence) -> list[tuple[bytes, bytes]]:
        """(hash, tokens) of its full blocks; each is hashed once in the life of a sequence."""
        size, hashes, token_ids = self.block_size, seq.block_hashes, seq.token_ids
        for i in range(len(hashes), len(token_ids) // size):
            tokens = array("i", token_ids[i * size : (i + 1) * size]).tobytes()
            parent = hashes[-1][0] if hashes else self._root(seq)
            hashes.append((xxhash.xxh3_128_digest(parent + tokens, self.seed), tokens))
        return hashes

    def _root(self, seq: Sequence) -> bytes:
        """Parent of the hash of the first block; hits need an equal one."""
        request = seq.request
        return (request.cache_salt if self.enable_prefix_caching else f"{request.sequences[0].seq_id}").encode()
