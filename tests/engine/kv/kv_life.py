"""The life of a BlockManager under test: its sequences, a simulated memory, and what must hold after each call."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.kv.kv_file import write_kv_file
from nanoengine.engine.kv.tiers import LowerTiers
from nanoengine.engine.messages import Place, Tier, Transfer
from nanoengine.engine.sequence import Sequence
from tests.engine.kv.slot_memory import SlotMemory
from tests.engine.toys import tell


class KVLife(RuleBasedStateMachine):
    """What a machine of random calls is made of: single calls with what each must do, and the invariants.

    Args:
        folder: has a folder for each life, for its disk tier.
        totals: counts what happened, over all lives.
        host: sizes of the host tier to choose from; 0 is none.
        disk: numbers of files to choose from; 0 is none.
    """

    def __init__(self, folder: Path, totals: Counter[str], host: list[int], disk: list[int]):
        super().__init__()
        self.folder, self.totals, self.host_sizes, self.disk_sizes = folder, totals, host, disk
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.touched: set[Sequence] = set()  # the batch to come makes copies for them: they fall with it
        self.drafts: dict[Sequence, int] = {}  # lookahead slots
        self.seq_ids = itertools.count()

    @initialize(data=st.data(), caching=st.integers(0, 5), block_size=st.sampled_from([1, 2, 3, 4]))
    def begin(self, data: st.DataObject, caching: int, block_size: int) -> None:
        self.size = block_size
        self.memory = SlotMemory(block_size)
        host = data.draw(st.sampled_from(self.host_sizes))
        disk = data.draw(st.sampled_from(self.disk_sizes))
        folder = self.folder / str(self.totals["lives"])
        self.manager = BlockManager(
            data.draw(st.integers(3, 10)),
            block_size,
            enable_prefix_caching=caching > 0,
            tiers=LowerTiers(HostTier(host) if host else None, DiskTier(folder, "f", 1, disk * 230) if disk else None),
        )

    def admit_one(self, seq: Sequence) -> None:
        before = self._everything(seq)
        loaded = self.manager.tiers.num_loaded_blocks
        cached = self.manager.admit(seq)
        if cached is None:
            assert self._everything(seq) == before
            assert self.manager.pool.num_free < self.manager.blocks_for(seq.num_tokens + 1)
            self.totals["failed admissions"] += 1
            if seq.num_tokens < self.manager.pool.num_blocks * self.size and len(self.waiting) < 6:
                self.waiting.append(seq)
            return
        self.totals["admissions"] += 1
        assert cached % self.size == 0
        assert 0 <= cached < seq.num_tokens
        seq.num_computed_tokens = seq.num_cached_tokens = cached
        self.running.append(seq)
        self.touched.add(seq)
        self.totals["hits"] += cached // self.size
        self.totals["loads"] += self.manager.tiers.num_loaded_blocks - loaded

    def append_one(self, seq: Sequence, token: int, lookahead: int) -> bool:
        tell(seq, token)
        before = self._everything(seq)
        copied = self.manager.stats.num_copied_blocks
        if not self.manager.allocate_slots(seq, lookahead):
            assert self._everything(seq) == before
            seq.token_ids.pop()
            seq.num_known_tokens -= 1
            self.totals["failed growth"] += 1
            return False
        self.totals["growth"] += 1
        assert seq.num_slots >= seq.num_tokens + lookahead
        self._assert_private(seq)
        self.drafts[seq] = lookahead
        self.touched.add(seq)
        self.totals["copies"] += self.manager.stats.num_copied_blocks - copied
        return True

    def _make_room(self, seq: Sequence) -> bool:
        copied = self.manager.stats.num_copied_blocks
        self.drafts.pop(seq, None)
        done = self.manager.allocate_slots(seq)
        if done:
            self.touched.add(seq)
        self.totals["copies"] += self.manager.stats.num_copied_blocks - copied
        return done

    def preempt_one(self, seq: Sequence, swap: bool) -> None:
        saved = self.manager.tiers.num_saved_blocks
        if swap:
            self.manager.swap_out(seq)
        else:
            self.manager.free(seq)
        self.forget(seq)
        seq.num_computed_tokens = 0
        self.waiting.append(seq)
        self.totals["swaps"] += swap
        self.totals["saves"] += self.manager.tiers.num_saved_blocks - saved

    def trim_one(self, seq: Sequence) -> None:
        kept = seq.block_table[: self.manager.blocks_for(seq.num_tokens)]
        self.manager.trim(seq)
        self.drafts.pop(seq, None)
        assert seq.block_table == kept

    def forget(self, seq: Sequence) -> None:
        assert (seq.block_table, seq.num_slots, seq.num_published) == ([], 0, 0)
        self.running.remove(seq)
        self.touched.discard(seq)
        self.drafts.pop(seq, None)

    def run_step(self, skip: set[int], chunk: int, accept: int) -> None:
        rows = self.plan_rows(skip, chunk)
        self.make_transfers(self.manager.take_transfers())
        for seq, count in rows.items():
            drafts = self._drafts_of(seq, count)
            self.memory.write(seq, seq.num_computed_tokens, seq.token_ids[: seq.num_computed_tokens + count] + drafts)
        self.manager.commit()
        for seq, count in rows.items():
            accepted = self._drafts_of(seq, count)[:accept]
            tell(seq, *accepted)
            seq.num_computed_tokens += count + len(accepted)
            if accepted:
                self.drafts[seq] -= len(accepted)
        self.touched.clear()
        self.totals["steps"] += 1

    def make_transfers(self, transfers: list[Transfer]) -> None:
        """Files are really there, so that they can be looked into; what blocks they hold is simulated."""
        self.memory.move(transfers)
        for transfer in transfers:
            if transfer.target.tier is Tier.DISK:
                write_kv_file(Path(str(transfer.target.where)), transfer.header, b"x")

    def plan_rows(self, skip: set[int], chunk: int) -> dict[Sequence, int]:
        """Who is in the batch with how many tokens; what that completes is published, as the scheduler does."""
        rows = {}
        for i, seq in enumerate(self.running):
            count = min(chunk, seq.num_uncomputed_tokens)
            if i in skip or not count:
                continue
            if seq.num_tokens > seq.num_slots and not self._make_room(seq):
                continue
            rows[seq] = count
            self.manager.publish(seq, seq.num_computed_tokens + count, settled=False)
        return rows

    def _drafts_of(self, seq: Sequence, count: int) -> list[int]:
        """Drafts follow the last token; their blocks must still be there."""
        if count < seq.num_uncomputed_tokens or seq.num_tokens + self.drafts.get(seq, 0) > seq.num_slots:
            return []
        return [1, 2, 0, 1, 2][: self.drafts.get(seq, 0)]

    def ready(self) -> list[Sequence]:
        return [seq for seq in self.running if not seq.num_uncomputed_tokens]

    def prefilled(self) -> list[Sequence]:
        return [seq for seq in self.running if seq.num_uncomputed_tokens <= 1]

    def begun(self) -> list[Sequence]:
        return [seq for seq in self.running if seq.num_computed_tokens]

    def choose(self, seqs: list[Sequence], which: int) -> Sequence:
        self.totals["rules"] += 1
        return seqs[which % len(seqs)]

    def _assert_private(self, seq: Sequence) -> None:
        """What it may write to from now on is its own, and cannot be hit."""
        for block in seq.block_table[seq.num_computed_tokens // self.size :]:
            assert self.manager.pool.ref_counts[block] == 1
            assert self.manager.pool.contents[block] is None

    def _everything(self, seq: Sequence) -> object:
        """All that a call which fails must leave alone; only what it learned about files may stay."""
        pool, tiers = self.manager.pool, self.manager.tiers
        return (
            list(pool.ref_counts),
            list(pool.contents),
            list(pool.free_blocks),
            [(p, p.blocks, p.host_slot) for p in pool.prefixes() if p.blocks or p.host_slot is not None],
            list(tiers.transfers),
            (tiers.num_saved_blocks, tiers.num_loaded_blocks),
            None if tiers.host is None else (list(tiers.host.entries), list(tiers.host.free_slots)),
            repr(self.manager.stats),
            (list(seq.block_table), seq.num_slots, seq.num_published, seq.num_computed_tokens),
        )

    @invariant()
    def the_books_are_right(self) -> None:
        self.manager.check()
        pool = self.manager.pool
        counts = Counter(block for seq in self.running for block in seq.block_table)
        assert pool.ref_counts == [counts[block] for block in range(pool.num_blocks + 1)]
        assert pool.num_free + len(counts) == pool.num_blocks
        for seq in self.running:
            assert len(seq.block_table) >= self.manager.blocks_for(seq.num_computed_tokens)
            assert seq.num_slots <= len(seq.block_table) * self.size
            if seq.num_slots > seq.num_computed_tokens:
                self._assert_private(seq)

    @invariant()
    def everything_reads_back(self) -> None:
        """Every table reads back the tokens of its sequence, and every copy of a prefix its own, in all tiers."""
        memory = self.memory.after(self.manager.tiers.transfers)
        for seq in self.running:
            memory.check_sequence(seq)
        disk = self.manager.tiers.disk
        for prefix in self.manager.pool.prefixes():
            places = [Place(Tier.DEVICE, block) for block in prefix.blocks]
            if prefix.host_slot is not None:
                places.append(Place(Tier.HOST, prefix.host_slot))
            if prefix.on_disk:
                assert disk is not None
                places.append(Place(Tier.DISK, str(disk.path(prefix.hash))))
            memory.check_prefix(prefix, places)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for seq in self.running:
            self.manager.free(seq)
        pool = self.manager.pool
        assert pool.num_free == pool.num_blocks
        assert not any(pool.ref_counts)
        self.manager.check()
        self.totals["lives"] += 1
        self.totals["evictions"] += self.manager.stats.num_evicted_blocks
        disk = self.manager.tiers.disk
        if disk is not None:
            self.totals["files"] += len(disk.files)
            assert {path.stem for path in disk.folder.iterdir()} <= set(disk.files)
            disk.clear()
