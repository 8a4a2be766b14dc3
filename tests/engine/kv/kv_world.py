"""The world of a BlockManager under test: its groups and tiers, a simulated device, and what must hold after each call."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.block_pool import NULL_BLOCK, Prefix
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.events import BlockRemoved
from nanoengine.engine.kv.groups import CHUNKED, ENCODER, WINDOW, KVSpec
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.messages import Place, Tier
from tests.engine.kv.late_device import LateDevice
from tests.engine.kv.slot_memory import all_tokens
from tests.engine.kv.toys import Known, ToySequence, cached, follow

KINDS = [
    "full",
    "window",
    "full window",
    "window window",
    "window chunked",
    "full chunked window",
    "full window encoder",
]
SIZES = st.sampled_from([1, 2, 3, 5, 6, 8, 13, 99])
"""Of windows and chunks: smaller than a block, no multiple of it, and larger than any sequence."""

MOST_DRAFTS = 5

LONGEST = 60
"""Tokens of a sequence whose groups would let it go on for ever."""


class KVWorld(RuleBasedStateMachine):
    """What a machine of random calls plays in.

    Args:
        folder: has a folder for each life, for its disk tier.
        totals: counts what happened, over all lives.
        host: sizes of the host tier to choose from; 0 is none.
        disk: numbers of files to choose from; 0 is none.
        kinds: of groups, to choose from.
    """

    def __init__(
        self, folder: Path, totals: Counter[str], host: list[int], disk: list[int], kinds: list[str] | None = None
    ):
        super().__init__()
        self.folder, self.totals, self.host_sizes, self.disk_sizes = folder, totals, host, disk
        self.kinds = kinds or KINDS
        self.running: list[ToySequence] = []
        self.waiting: list[ToySequence] = []
        self.touched: set[ToySequence] = set()  # the plan to come makes copies for them: they fall with it
        self.drafts: dict[ToySequence, int] = {}  # lookahead slots
        self.encoded: set[ToySequence] = set()  # a plan has written, or will write, what their encoder made
        self.admissions: Counter[ToySequence] = Counter()
        self.known: Known = Counter()  # what a listener has been told
        self.seq_ids = itertools.count()
        self.first_rule = totals["rules"]

    @initialize(data=st.data(), caching=st.integers(0, 5), block_size=st.sampled_from([1, 2, 3, 4]))
    def begin(self, data: st.DataObject, caching: int, block_size: int) -> None:
        kinds = data.draw(st.sampled_from(self.kinds)).split()
        self.specs = tuple(KVSpec(kind, data.draw(SIZES) if kind in (WINDOW, CHUNKED) else 0) for kind in kinds)
        self.growing = [group for group, kind in enumerate(kinds) if kind != ENCODER]
        self.size = block_size
        self.device = LateDevice(block_size, self.specs)
        host = data.draw(st.sampled_from(self.host_sizes))
        disk = data.draw(st.sampled_from(self.disk_sizes))
        folder = self.folder / str(self.totals["lives"])
        self.most_new = data.draw(st.sampled_from([2, 3, 5, 9, 99]))
        num_blocks = data.draw(st.integers(3, 10)) + data.draw(st.integers(2, 6)) * (len(kinds) - 1)
        self.manager = BlockManager(
            num_blocks,
            block_size,
            enable_prefix_caching=caching > 0,
            specs=self.specs,
            most_new_tokens=self.most_new,
            host=HostTier(host) if host else None,
            disk=DiskTier(folder, "f", 1, disk * 285) if disk else None,
            hash_seed=7,
        )
        self.manager.collect_events = True
        num_own = num_blocks - 2 * (ENCODER in kinds)
        self.longest = self.manager.groups.longest(num_own, LONGEST if self.manager.groups.forget else 999)

    # ---- sequences

    def new_sequence(self, prompt: list[int], salt: str = "", reads_cache: bool = True) -> ToySequence:
        seq_id = next(self.seq_ids)
        num_encoder_tokens = 0 if len(self.growing) == len(self.specs) else 1 + seq_id % 2 * self.size
        if num_encoder_tokens:  # what the encoder has seen is in the salt
            salt = str(num_encoder_tokens)
        seq = ToySequence(seq_id, prompt, cache_salt=salt, reads_cache=reads_cache)
        seq.num_encoder_tokens = num_encoder_tokens
        return seq

    def needs(self, seq: ToySequence, num_tokens: int) -> int:
        """The most blocks that it can need at once."""
        return self.manager.groups.blocks_at_once(num_tokens) + -(-seq.num_encoder_tokens // self.size)

    def chain_of(self, seq: ToySequence) -> list[Prefix]:
        """What the index knows of what it could hit."""
        chain: list[Prefix] = []
        parent, hash, pool = None, b"", self.manager.pool
        for i in range(min(seq.num_tokens - 1, seq.num_known_tokens) // self.size):
            piece = array("i", seq.token_ids[i * self.size : (i + 1) * self.size]).tobytes()
            piece = piece if i else seq.cache_salt + piece
            hash = pool.hash_block(hash, piece)
            parent = pool.find(hash, parent, piece)
            if parent is None:
                break
            chain.append(parent)
        return chain

    def longest_hit(self, seq: ToySequence) -> int:
        """Blocks of the longest beginning behind which every group has all that the next token sees, by definition."""
        if not (self.manager.enable_prefix_caching and seq.reads_cache):
            return 0
        chain = self.chain_of(seq)
        return max(
            count
            for count in range(len(chain) + 1)
            if all(
                has(chain[i], group)
                for group in self.growing
                for i in range(self.specs[group].first_seen(count * self.size) // self.size, count)
            )
        )

    def in_flight(self) -> set[ToySequence]:
        return {row.seq for plan in self.device.plans for row in plan.rows}

    def idle(self) -> list[ToySequence]:
        """Running, and all that is known of them is done."""
        busy = self.in_flight()
        return [seq for seq in self.running if seq not in busy and not seq.coming]

    def ready(self) -> list[ToySequence]:
        return [seq for seq in self.idle() if not seq.num_uncomputed_tokens]

    def prefilled(self) -> list[ToySequence]:
        return [seq for seq in self.begun() if seq.num_uncomputed_tokens <= 1]

    def begun(self) -> list[ToySequence]:
        return [
            seq
            for seq in self.idle()
            if seq.num_computed_tokens and (seq in self.encoded or not seq.num_encoder_tokens)
        ]

    def admissible(self) -> list[ToySequence]:
        return [seq for seq in self.waiting if not seq.coming and not self.manager.is_fetching(seq)]

    # ---- what must hold

    def assert_private(self, seq: ToySequence) -> None:
        """What it may write to from now on is its own, and cannot be hit."""
        for group in self.growing:
            for block in seq.block_tables[group][seq.num_computed_tokens // self.size :]:
                assert block != NULL_BLOCK
                assert self.manager.pool.ref_counts[block] == 1
                assert self.manager.pool.contents[block] is None

    def everything(self, seq: ToySequence) -> object:
        """All that a call which fails must leave alone."""
        pool, tiers, plan = self.manager.pool, self.manager.tiers, self.manager._plan
        return (
            list(pool.ref_counts),
            list(pool.contents),
            pool.free_blocks,
            dict(pool.uncommitted),
            [
                (prefix, prefix.num_uses, [kv and (kv.blocks, kv.host_slot, kv.host_filled) for kv in prefix.kv])
                for prefix in pool.prefixes()
            ],
            list(pool.events or []),
            repr(plan.orders()),
            (list(plan.published), list(plan.forgotten), list(plan.forks), list(plan.saved), list(plan.pinned)),
            None
            if tiers.host is None
            else (list(tiers.host.entries), list(tiers.host.free_slots), list(tiers.host.pins)),
            None if tiers.disk is None else (list(tiers.disk.files), set(tiers.disk.writing), set(tiers.disk.barred)),
            repr(self.manager.stats),
            [list(table) for table in seq.block_tables],
            (list(seq.first_blocks), seq.prefix, seq.num_slots, seq.num_published, seq.num_computed_tokens),
        )

    @invariant()
    def the_books_are_right(self) -> None:
        self.manager.check()
        pool = self.manager.pool
        counts: Counter[int] = Counter()
        for seq in self.running:
            self.manager.check_tables(seq)  # type: ignore[arg-type]
            counts.update(block for table in seq.block_tables for block in table if block != NULL_BLOCK)
            for group, table in enumerate(seq.block_tables):
                num_held = sum(block != NULL_BLOCK for block in table)
                if group in self.growing:
                    most = seq.num_tokens + MOST_DRAFTS + 1  # slots of drafts stay until they are taken back
                    assert num_held <= self.manager.groups.most_blocks(group, most)
                    assert seq.num_slots <= len(table) * self.size
                else:
                    assert num_held == -(-seq.num_encoder_tokens // self.size)
            if seq.num_slots > seq.num_computed_tokens:
                self.assert_private(seq)
        assert pool.ref_counts == [counts[block] for block in range(pool.num_blocks + 1)]
        assert pool.num_free + len(counts) == pool.num_blocks
        uses = Counter(prefix.parent for prefix in pool.prefixes())
        uses.update(seq.prefix for seq in self.running)
        uses.update(prefix for prefix in pool.prefixes() for kv in prefix.kv if kv is not None)
        assert all(prefix.num_uses == uses[prefix] for prefix in pool.prefixes()), "nobody else keeps it in the index"

    @invariant()
    def a_listener_knows_what_is_cached_in_each_group(self) -> None:
        for event in self.manager.drain_events():
            follow(self.known, [event])
            if isinstance(event, BlockRemoved):
                others = (self.known[event.hash, group] for group in self.growing)
                self.totals["evictions that leave other groups"] += any(others)
        assert self.known == cached(self.manager)

    @invariant()
    def what_is_committed_reads_back(self) -> None:
        """Every copy that counts as written holds what its prefix says, in all tiers, now."""
        pool, disk = self.manager.pool, self.manager.tiers.disk
        for kv in (kv for prefix in pool.prefixes() for kv in prefix.kv if kv is not None):
            places = [Place(Tier.DEVICE, block) for block in kv.blocks if block not in pool.uncommitted]
            if kv.host_filled:
                assert kv.host_slot is not None
                places.append(Place(Tier.HOST, kv.host_slot))
            self.device.memory.check_prefix(kv, places)
        if disk is not None:
            self.device.check_files(disk, pool)

    @invariant()
    def what_is_promised_will_read_back(self) -> None:
        """If nothing breaks: every table all that its next token sees, and every copy of a prefix what it says."""
        plans = self.device.plans
        if any(plan.fate != "good" or any(row.poisoned or row.fault for row in plan.rows) for plan in plans):
            return
        if any(parent not in self.running for plan in plans for parent, _ in plan.forks):
            return  # it may have been poisoned: then its fork falls when its own plan lands
        memory = self.device.after(self.manager._plan.orders())
        for seq in self.running:
            tokens = all_tokens(seq)[: seq.num_computed_tokens]
            encoded = seq.num_encoder_tokens if seq in self.encoded else 0
            assert memory.fault(seq.cache_salt, seq.block_tables, tokens, len(tokens), encoded) is None
        planned = {block for _, _, block, _ in self.manager._plan.published}
        for kv in (kv for prefix in self.manager.pool.prefixes() for kv in prefix.kv if kv is not None):
            places = [Place(Tier.DEVICE, block) for block in kv.blocks if block not in planned]
            if kv.host_slot is not None:
                places.append(Place(Tier.HOST, kv.host_slot))
            memory.check_prefix(kv, places)


def has(prefix: Prefix, group: int) -> bool:
    """Whether a group can hit it in memory."""
    kv = prefix.kv[group]
    return kv is not None and (bool(kv.blocks) or kv.host_filled)
