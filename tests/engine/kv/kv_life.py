"""The life of a BlockManager under test: its sequences, a simulated device, and what must hold after each call."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.messages import Place, Tier
from tests.engine.kv.late_device import LateDevice, Row, ToyPlan
from tests.engine.kv.slot_memory import all_tokens
from tests.engine.kv.toys import ToySequence, tell


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
        self.running: list[ToySequence] = []
        self.waiting: list[ToySequence] = []
        self.touched: set[ToySequence] = set()  # the plan to come makes copies for them: they fall with it
        self.drafts: dict[ToySequence, int] = {}  # lookahead slots
        self.seq_ids = itertools.count()

    @initialize(data=st.data(), caching=st.integers(0, 5), block_size=st.sampled_from([1, 2, 3, 4]))
    def begin(self, data: st.DataObject, caching: int, block_size: int) -> None:
        self.size = block_size
        self.device = LateDevice(block_size)
        host = data.draw(st.sampled_from(self.host_sizes))
        disk = data.draw(st.sampled_from(self.disk_sizes))
        folder = self.folder / str(self.totals["lives"])
        self.manager = BlockManager(
            data.draw(st.integers(3, 10)),
            block_size,
            enable_prefix_caching=caching > 0,
            host=HostTier(host) if host else None,
            disk=DiskTier(folder, "f", 1, disk * 270) if disk else None,
            hash_seed=7,
        )

    # ---- single calls

    def admit_one(self, seq: ToySequence) -> None:
        if self.manager.fetch(seq):
            assert self.manager.is_fetching(seq)
            self.totals["fetches"] += 1
            self.waiting.append(seq)
            return
        before = self._everything(seq)
        loaded = self.manager.stats.num_loaded_blocks
        cached = self.manager.admit(seq)
        if cached is None:
            assert self._everything(seq) == before
            assert self.manager.pool.num_free < self.manager.blocks_for(seq.num_tokens + 1)
            self.totals["failed admissions"] += 1
            if seq.num_tokens < self.manager.pool.num_blocks * self.size and len(self.waiting) < 6:
                self.waiting.append(seq)
            else:
                self.manager.cancel_fetch(seq)
            return
        self.totals["admissions"] += 1
        assert cached % self.size == 0
        assert 0 <= cached < seq.num_tokens
        assert seq.reads_cache or not cached
        seq.num_computed_tokens = seq.num_cached_tokens = cached
        self.running.append(seq)
        self.touched.add(seq)
        self.totals["hits"] += cached // self.size
        self.totals["loads"] += self.manager.stats.num_loaded_blocks - loaded

    def append_one(self, seq: ToySequence, token: int, lookahead: int) -> bool:
        tell(seq, token)
        if self._make_room(seq, lookahead):
            self.drafts[seq] = lookahead
            return True
        seq.token_ids.pop()
        return False

    def _make_room(self, seq: ToySequence, lookahead: int = 0) -> bool:
        before, table = self._everything(seq), list(seq.block_table)
        copied = self.manager.stats.num_copied_blocks
        self.drafts.pop(seq, None)
        growth = self.manager.allocate_slots(seq, lookahead)
        if growth is None:
            assert self._everything(seq) == before
            self.totals["failed growth"] += 1
            return False
        if growth.replaced is not None:
            table[growth.replaced[0]] = growth.replaced[1]
        assert table + growth.new == seq.block_table, "a growth says what has changed"
        assert seq.num_slots >= seq.num_tokens + lookahead
        self._assert_private(seq)
        self.touched.add(seq)
        self.totals["growth"] += 1
        self.totals["copies"] += self.manager.stats.num_copied_blocks - copied
        return True

    def preempt_one(self, seq: ToySequence, swap: bool) -> None:
        saved = self.manager.stats.num_saved_blocks
        if swap:
            self.manager.swap_out(seq)
        else:
            self.manager.free(seq)
        self.forget(seq)
        seq.num_computed_tokens = 0
        self.waiting.append(seq)
        self.totals["swaps"] += swap
        self.totals["saves"] += self.manager.stats.num_saved_blocks - saved

    def trim_one(self, seq: ToySequence) -> None:
        kept = seq.block_table[: self.manager.blocks_for(seq.num_tokens)]
        self.manager.trim(seq)
        self.drafts.pop(seq, None)
        assert seq.block_table == kept

    def forget(self, seq: ToySequence) -> None:
        assert (seq.block_table, seq.num_slots, seq.num_published) == ([], 0, 0)
        self.running.remove(seq)
        self.touched.discard(seq)
        self.drafts.pop(seq, None)

    def end(self, seq: ToySequence) -> None:
        """It has ended, wherever it stands."""
        if seq in self.running:
            self.manager.discard(seq)
            self.forget(seq)
        elif seq in self.waiting:
            self.manager.cancel_fetch(seq)
            self.waiting.remove(seq)

    # ---- plans

    def launch(
        self, rows: dict[ToySequence, int], *, fate: str = "good", num_done: int = 99, poison: bool = False
    ) -> ToyPlan:
        """A plan that computes so many tokens of some sequences, in order; the last of them may be poisoned."""
        made = [self._row(seq, count) for seq, count in rows.items()]
        if poison and made:
            made[-1].poisoned = True
        others = sorted((seq for seq in self.touched if seq not in rows), key=lambda seq: seq.seq_id)
        plan = ToyPlan(self.manager.take_orders(), made, others, fate=fate, num_done=num_done)
        self.totals["reads"] += len(plan.orders.reads)
        self.totals["writes"] += len(plan.orders.writes)
        self.touched.clear()
        self.device.launch(plan)
        return plan

    def _row(self, seq: ToySequence, count: int) -> Row:
        end = seq.num_computed_tokens + count
        return Row(
            seq, list(seq.block_table), all_tokens(seq)[:end] + self.drafts_of(seq, count), seq.num_computed_tokens
        )

    def land(self) -> None:
        """Take the result of the oldest plan."""
        plan = self.device.land()
        everybody = list(dict.fromkeys([*(row.seq for row in plan.rows), *plan.others, *plan.sampled]))
        alive = [seq for seq in everybody if seq in self.running or seq in self.waiting]
        if plan.fate == "good":
            self.manager.commit(self.device.take_answers())
            for seq in plan.sampled:
                if seq in alive:
                    seq.token_ids.append(seq.coming.pop(0))
            spoilt = [row.seq for row in plan.rows if not row.is_sound]
            for seq in [*spoilt, *(child for parent, child in plan.forks if parent in spoilt)]:
                self.manager.condemn(seq)  # its logits are NaN, whatever has become of it meanwhile
                self.totals["condemned"] += 1
                if seq in self.running:
                    self.forget(seq)
                self.end(seq)
        else:
            before = list(self.running)
            fallen = self.manager.rollback(everybody, self.running)
            assert fallen[: len(everybody)] == everybody
            assert set(fallen[len(everybody) :]) <= set(before) - set(everybody)
            self.totals["fallen with others"] += len(fallen) - len(everybody)
            self.totals["failed plans"] += 1
            for seq in fallen:
                self.end(seq)
        self.totals["steps"] += 1

    def land_all(self) -> None:
        while self.device.plans:
            self.land()

    def plan_rows(self, skip: set[int], chunk: int) -> dict[ToySequence, int]:
        """Who is in the plan with how many tokens; what that completes is published, as the scheduler does."""
        rows = {}
        for i, seq in enumerate(self.running):
            count = min(chunk, seq.num_uncomputed_tokens)
            if i in skip or not count:
                continue
            if seq.num_tokens > seq.num_slots and not self._make_room(seq):
                continue
            rows[seq] = count
            end = seq.num_computed_tokens + count
            if end <= seq.num_known_tokens and not seq.coming:
                self.manager.publish(seq, end, committed=False)
        return rows

    def run_step(self, skip: set[int], chunk: int, accept: int) -> None:
        """A whole step, with drafts, of which some are accepted; nothing else is on its way."""
        self.land_all()
        rows = self.plan_rows(skip, chunk)
        self.launch(rows)
        self.land()
        for seq, count in rows.items():
            if seq not in self.running:
                continue
            accepted = self.drafts_of(seq, count)[:accept]
            tell(seq, *accepted)
            seq.num_computed_tokens += count + len(accepted)
            if accepted:
                self.drafts[seq] -= len(accepted)

    def drafts_of(self, seq: ToySequence, count: int) -> list[int]:
        """Drafts follow the last token; their blocks must still be there."""
        if count < seq.num_uncomputed_tokens or seq.num_tokens + self.drafts.get(seq, 0) > seq.num_slots:
            return []
        return [1, 2, 0, 1, 2][: self.drafts.get(seq, 0)]

    # ---- who can do what

    def in_flight(self) -> set[ToySequence]:
        return {row.seq for plan in self.device.plans for row in plan.rows}

    def idle(self) -> list[ToySequence]:
        """Running, and all that is known of them is done."""
        busy = self.in_flight()
        return [seq for seq in self.running if seq not in busy and not seq.coming]

    def ready(self) -> list[ToySequence]:
        return [seq for seq in self.idle() if not seq.num_uncomputed_tokens]

    def prefilled(self) -> list[ToySequence]:
        return [seq for seq in self.idle() if seq.num_uncomputed_tokens <= 1]

    def begun(self) -> list[ToySequence]:
        return [seq for seq in self.idle() if seq.num_computed_tokens]

    def admissible(self) -> list[ToySequence]:
        return [seq for seq in self.waiting if not seq.coming and not self.manager.is_fetching(seq)]

    def choose(self, seqs: list[ToySequence], which: int) -> ToySequence:
        self.totals["rules"] += 1
        return seqs[which % len(seqs)]

    # ---- what must hold

    def _assert_private(self, seq: ToySequence) -> None:
        """What it may write to from now on is its own, and cannot be hit."""
        for block in seq.block_table[seq.num_computed_tokens // self.size :]:
            assert self.manager.pool.ref_counts[block] == 1
            assert self.manager.pool.contents[block] is None

    def _everything(self, seq: ToySequence) -> object:
        """All that a call which fails must leave alone."""
        pool, tiers = self.manager.pool, self.manager.tiers
        return (
            list(pool.ref_counts),
            list(pool.contents),
            pool.free_blocks,
            [(p, p.blocks, p.host_slot, p.host_filled) for p in pool.prefixes()],
            repr(self.manager._plan.orders()),
            None
            if tiers.host is None
            else (list(tiers.host.entries), list(tiers.host.free_slots), list(tiers.host.pins)),
            None if tiers.disk is None else (list(tiers.disk.files), set(tiers.disk.writing), set(tiers.disk.barred)),
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
    def what_is_committed_reads_back(self) -> None:
        """Every copy that counts as written holds what its prefix says, in all tiers, now."""
        pool, disk = self.manager.pool, self.manager.tiers.disk
        for prefix in pool.prefixes():
            places = [Place(Tier.DEVICE, block) for block in prefix.blocks if block not in pool.uncommitted]
            if prefix.host_filled:
                assert prefix.host_slot is not None
                places.append(Place(Tier.HOST, prefix.host_slot))
            self.device.memory.check_prefix(prefix, places)
        if disk is not None:
            self.device.check_files(disk, pool)

    @invariant()
    def what_is_promised_will_read_back(self) -> None:
        """If nothing breaks: every table its own tokens, and every copy of a prefix what it says."""
        plans = self.device.plans
        if any(plan.fate != "good" or any(row.poisoned or not row.is_sound for row in plan.rows) for plan in plans):
            return
        memory = self.device.after(self.manager._plan.orders())
        for seq in self.running:
            assert memory.holds(seq.cache_salt, seq.block_table, all_tokens(seq)[: seq.num_computed_tokens])
        planned = {block for _, block, _ in self.manager._plan.published}
        for prefix in self.manager.pool.prefixes():
            places = [Place(Tier.DEVICE, block) for block in prefix.blocks if block not in planned]
            if prefix.host_slot is not None:
                places.append(Place(Tier.HOST, prefix.host_slot))
            memory.check_prefix(prefix, places)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for seq in [*self.running, *self.waiting]:
            self.end(seq)
        self.land_all()
        for _ in range(3):  # what was ordered is done, and what that leads to
            self.launch({})
            self.device.do_files(999)
            self.land()
        pool, tiers = self.manager.pool, self.manager.tiers
        assert pool.num_free == pool.num_blocks
        assert not any(pool.ref_counts)
        self.manager.check()
        assert tiers.host is None or not any(tiers.host.pins), "nobody holds a slot any more"
        self.totals["lives"] += 1
        self.totals["evictions"] += self.manager.stats.num_evicted_blocks
        self.totals["bad files"] += self.manager.stats.num_bad_files
        self.totals["disk hits"] += self.manager.stats.hits_by_tier[Tier.DISK]
