"""PrefixCache: which prefixes of sequences are cached, in the pool and below it, and what plans in flight have to do with that.

Nothing here waits or calls out: what the executor must do is collected as orders of the plan that is being made, and what others
want to hear is collected until it is drained.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from struct import Struct

from nanoengine.engine.kv.block_pool import NULL_BLOCK, BlockPool, Prefix, PrefixKV
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.events import BlockStored, KVEvent
from nanoengine.engine.kv.file_reads import FileReads
from nanoengine.engine.kv.groups import ENCODER, FULL, Groups, KVSpec
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.kv.orders import Orders, PlanRecord, find_fallout
from nanoengine.engine.kv.statistics import CacheStats, GroupStats
from nanoengine.engine.kv.tiers import LowerTiers
from nanoengine.engine.messages import FileDone
from nanoengine.engine.sequence import Sequence


class PrefixCache:
    """The pool, the tiers below it, and the plans that fill them.

    Plans are made one after the other: `take_orders` ends one. Each is then committed or rolled back, in the same order; any
    number may be in flight. Whoever was given blocks since the plan before, and still has them, takes part in the plan.

    Args:
        num_blocks: usable blocks of the pool.
        block_size: tokens per block.
        enable_prefix_caching: find and publish prefixes; without it every block is private, but for forks.
        specs: what the layers of each KV group remember.
        most_new_tokens: of one sequence in one step.
        host: host memory for blocks that the pool has no room for.
        disk: files for what host memory has no room for; it needs a host tier, see there how large.
        hash_seed: seed of the prefix hashes; None draws one.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        *,
        specs: tuple[KVSpec, ...] = (KVSpec(),),
        most_new_tokens: int = 1,
        host: HostTier | None = None,
        disk: DiskTier | None = None,
        hash_seed: int | None = None,
    ):
        self.groups = groups = Groups(specs, block_size, most_new_tokens)
        self.block_size = block_size
        self._pack = Struct(f"={self.block_size}i").pack  # tokens of a block as bytes
        self._forgets = groups.forget
        self._growing = [group for group, spec in enumerate(groups.specs) if spec.kind != ENCODER]
        self._num_growing = len(self._growing)
        assert self._growing == [*range(self._num_growing)], "those of encoders come last"
        self._forgetting = [(group, spec) for group, spec in enumerate(groups.specs) if spec.forgets]
        self._complete = [group for group, spec in enumerate(groups.specs) if spec.kind == FULL]
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, len(groups), hash_seed)
        self.stats = CacheStats(groups=[GroupStats() for _ in groups.specs])
        self.tiers = LowerTiers(self.pool, host, disk, self.stats)
        self._reads = None if disk is None else FileReads(self.pool, self.tiers, groups)
        self._spoilt: set[int] = set()  # blocks that nobody has, and that may hold what is no number
        self._plan = PlanRecord()  # being made
        self._in_flight: deque[PlanRecord] = deque()  # the oldest first

    # ---- prefixes

    def publish(self, seq: Sequence, num_computed_tokens: int, committed: bool = True) -> None:
        """Publish the blocks of a sequence that are complete when so many of its tokens are computed.

        `committed=False` says that the plan that is being made computes them: `rollback` withdraws them if it fails.
        """
        last = num_computed_tokens // self.block_size
        first = seq.num_published
        if first >= last or not self.enable_prefix_caching:
            return
        before = prefix = seq.prefix
        if prefix is not None and not prefix.is_known:  # it was withdrawn, and with it all that follows
            return
        self._hash_blocks(seq, last)
        store, tables = self.pool.store, seq.block_tables
        if len(tables) > self._num_growing:
            tables = tables[: self._num_growing]
        hashes, tokens = seq.block_hashes, seq.block_tokens
        for i in range(first, last):
            prefix = store(hashes[i], prefix, tokens[i], tables, i)
            if not committed:
                for table in tables:
                    if table[i] != NULL_BLOCK:
                        self._promise(seq, table[i], prefix)
        assert prefix is not None
        seq.num_published, seq.prefix = last, prefix
        prefix.num_uses += 1
        if before is not None:
            before.num_uses -= 1  # it has a child

    def _promise(self, seq: Sequence, block: int, prefix: Prefix) -> None:
        """The plan that is being made writes a block."""
        self.pool.uncommitted[block] = self._plan
        self._plan.published.append((seq, seq.block_tables, block, prefix))

    def has_unpublished(self, seq: Sequence) -> bool:
        """Whether a sequence has computed blocks that the cache does not know."""
        return self.enable_prefix_caching and seq.num_computed_tokens // self.block_size > seq.num_published

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, in every tier; refused (False) while any block is in use."""
        if not self.pool.clear():
            return False
        self.tiers.clear(self._plan)
        if self._reads is not None:
            self._reads.forget_dropped()
        return True

    def save_all(self) -> None:
        """Order all that is cached to be written to files: the engine is about to end."""
        self.tiers.write_all(self._plan)

    def _looks_up(self, seq: Sequence) -> bool:
        return self.enable_prefix_caching and seq.reads_cache

    def _num_cacheable(self, seq: Sequence) -> int:
        """Blocks of a sequence that may come from the cache, its last token left out. They are hashed."""
        count = min(seq.num_tokens - 1, seq.num_known_tokens) // self.block_size
        self._hash_blocks(seq, count)
        return count

    def _find_chain(self, seq: Sequence, count: int) -> list[Prefix]:
        """What the index knows of the first `count` blocks of a sequence, one behind the other."""
        chain: list[Prefix] = []
        parent: Prefix | None = None
        for hash, token_bytes in zip(seq.block_hashes[:count], seq.block_tokens, strict=False):
            parent = self.pool.find(hash, parent, token_bytes)
            if parent is None:
                break
            chain.append(parent)
        return chain

    def _find_hit(self, seq: Sequence, count: int) -> list[Prefix]:
        """The longest prefix of a sequence, of at most `count` blocks, that all groups have in the pool or in host memory, as far
        as the next token sees it.
        """
        hits = self._find_chain(seq, count)
        for i, prefix in enumerate(hits):
            if not all(_can_be_hit(prefix.kv[group]) for group in self._complete):
                del hits[i:]
                break
        if self._forgets:
            del hits[self.groups.longest_hit(len(hits), lambda group, i: _can_be_hit(hits[i].kv[group])) :]
        return hits

    def _hash_blocks(self, seq: Sequence, count: int) -> None:
        """See to it that the first `count` full blocks of a sequence are hashed; each is, once in its life."""
        hashes, size = seq.block_hashes, self.block_size
        start = len(hashes)
        if start >= count:
            return
        hash_block, pack, tokens = self.pool.hash_block, self._pack, seq.token_ids
        hash, salt = (hashes[-1], b"") if start else (b"", seq.cache_salt)
        for at in range(start * size, count * size, size):
            piece = salt + pack(*tokens[at : at + size])
            hash, salt = hash_block(hash, piece), b""
            hashes.append(hash)
            seq.block_tokens.append(piece)

    # ---- files

    def fetch(self, seq: Sequence) -> bool:
        """See whether files continue what the pool and host memory have of a waiting sequence, and order them to be read.

        Returns:
            True: it has to wait until `is_fetching` is False. That happens once before it is admitted.
        """
        reads = self._reads
        if reads is None or not self._looks_up(seq):
            return False
        if seq in reads.fetches:
            return reads.is_fetching(seq)
        count = self._num_cacheable(seq)
        return reads.begin(self._plan, seq, self._find_chain(seq, count), count)

    def is_fetching(self, seq: Sequence) -> bool:
        """Whether a sequence waits for files."""
        return self._reads is not None and self._reads.is_fetching(seq)

    def cancel_fetch(self, seq: Sequence) -> None:
        """It waits no longer, for files or to be admitted. What is being read for it alone is given back when it has come."""
        if self._reads is not None:
            self._reads.end(seq)

    # ---- plans in flight

    @property
    def has_orders(self) -> bool:
        """Whether the plan that is being made has something to do for the cache."""
        return any(self._plan.orders())

    def take_orders(self) -> Orders:
        """End the plan that is being made: what the executor must do for it. From now on it is in flight."""
        plan, self._plan = self._plan, PlanRecord()
        self._in_flight.append(plan)
        return plan.orders()

    def commit(self, files: Iterable[FileDone] = ()) -> None:
        """The oldest plan in flight was executed: what it promised is there. And some files, of any plan, are done."""
        plan = self._in_flight.popleft()
        plan.commit(self.pool)
        self.tiers.commit(plan)
        if self._reads is not None:
            for done in files:
                self._reads.answer(self._plan, done)

    def rollback(self, failed: Iterable[Sequence], running: Iterable[Sequence]) -> list[Sequence]:
        """The oldest plan in flight failed: withdraw what it promised, and what follows from that.

        Args:
            failed: the sequences of the plan, also those that have ended since: later plans may hold what they computed.
            running: all sequences with blocks.

        Returns:
            all that must fail: the given ones, and those that hold a block which was withdrawn. They are to be discarded.
        """
        spoilt = self._in_flight.popleft()
        fallen, blocks = find_fallout(spoilt, (*self._in_flight, self._plan), self.pool, failed, running)
        for block in reversed(blocks):
            self.pool.withdraw(block)
        self.tiers.rollback(self._plan, spoilt, self._in_flight[0] if self._in_flight else self._plan)
        if self._reads is not None:
            self._reads.rollback(self._plan)
        return fallen

    # ---- what others want to know

    @property
    def collect_events(self) -> bool:
        """Whether what enters and leaves the cache is noted, for `drain_events`."""
        return self.pool.events is not None

    @collect_events.setter
    def collect_events(self, wanted: bool) -> None:
        self.pool.events = [] if wanted else None

    def drain_events(self) -> list[KVEvent]:
        """What has entered and left the cache since the last call."""
        events = self.pool.events
        if not events:
            return []
        self.pool.events = []
        return events

    def cached_blocks(self) -> list[BlockStored]:
        """All that is cached in memory, parents before children: what somebody has missed who begins to listen now."""
        return self.pool.stored()

    def check(self) -> None:
        """Raise AssertionError if an invariant of the pool or of a tier is broken."""
        self.pool.check()
        self.tiers.check()
        plans = (*self._in_flight, self._plan)
        assert all(any(plan is owner for plan in plans) for owner in self.pool.uncommitted.values())
        if self.tiers.host is not None:
            pins = Counter(slot for plan in plans for slot in plan.pinned)
            pins.update(() if self._reads is None else self._reads.pinned_slots())
            assert self.tiers.host.pins == [pins[slot] for slot in range(self.tiers.host.num_slots)]


def _can_be_hit(kv: PrefixKV | None) -> bool:
    return kv is not None and kv.can_be_hit
