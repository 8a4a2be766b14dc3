"""The life of a BlockManager under test: single calls with what each must do, and plans on their way."""

from __future__ import annotations

from nanoengine.engine.kv.orders import find_fallout
from nanoengine.engine.messages import Tier
from tests.engine.kv.kv_world import KVWorld, has
from tests.engine.kv.late_device import Row, ToyPlan
from tests.engine.kv.slot_memory import GARBAGE, all_tokens
from tests.engine.kv.toys import ToySequence, tell


class KVLife(KVWorld):
    """What a machine of random calls is made of."""

    # ---- single calls

    def admit_one(self, seq: ToySequence) -> None:
        if self.manager.fetch(seq):
            assert self.manager.is_fetching(seq)
            self.totals["fetches"] += 1
            self.waiting.append(seq)
            return
        before, best = self.everything(seq), self.longest_hit(seq)
        chain = self.chain_of(seq)
        beginnings = [[has(prefix, group) for prefix in chain] for group in self.growing]
        loaded = self.manager.stats.num_loaded_blocks
        cached = self.manager.admit(seq)
        if cached is None:
            assert self.everything(seq) == before
            assert self.manager.pool.num_free < self.needs(seq, seq.num_tokens + 1)
            self.totals["failed admissions"] += 1
            if self.needs(seq, seq.num_tokens + 1) <= self.manager.pool.num_blocks and len(self.waiting) < 6:
                self.waiting.append(seq)
            else:
                self.manager.cancel_fetch(seq)
            return
        self.totals["admissions"] += 1
        assert cached == best * self.size
        assert 0 <= cached < seq.num_tokens
        seq.num_computed_tokens = seq.num_cached_tokens = cached
        self.running.append(seq)
        self.admissions[seq] += 1
        self.touched.add(seq)
        self.totals["hits"] += best
        self.totals["loads"] += self.manager.stats.num_loaded_blocks - loaded
        for group, beginning in zip(self.growing, beginnings, strict=True):
            first = seq.first_blocks[group]
            assert first == self.specs[group].first_seen(cached) // self.size
            assert all(self.manager.pool.contents[block] for block in seq.block_tables[group][first:best])
            self.totals["hits without their beginning"] += not all(beginning[:first])

    def append_one(self, seq: ToySequence, token: int, lookahead: int) -> bool:
        tell(seq, token)
        if self._make_room(seq, lookahead):
            self.drafts[seq] = lookahead
            return True
        seq.token_ids.pop()
        return False

    def _make_room(self, seq: ToySequence, lookahead: int = 0) -> bool:
        before, tables = self.everything(seq), [list(table) for table in seq.block_tables]
        copied = self.manager.stats.num_copied_blocks
        self.drafts.pop(seq, None)
        changes = self.manager.allocate_slots(seq, lookahead)  # type: ignore[arg-type]
        if changes is None:
            assert self.everything(seq) == before
            self.totals["failed growth"] += 1
            return False
        for _, group, first, blocks in changes:
            assert first <= len(tables[group])
            tables[group][first : first + len(blocks)] = blocks
        assert tables == seq.block_tables, "it says what has changed"
        computed = seq.num_computed_tokens
        assert seq.first_blocks == [spec.first_seen(computed) // self.size for spec in self.specs]
        most = computed + self.most_new if self.manager.groups.forget else 9999
        assert seq.num_slots >= min(seq.num_tokens + lookahead, most)
        self.assert_private(seq)
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
        keep = self.manager.blocks_for(seq.num_tokens)
        kept = [table[:keep] if group in self.growing else table for group, table in enumerate(seq.block_tables)]
        self.manager.trim(seq)
        self.drafts.pop(seq, None)
        assert seq.block_tables == kept

    def fork_one(self, parent: ToySequence, whole: bool) -> ToySequence:
        keep = parent.num_tokens if whole else parent.num_computed_tokens
        child = ToySequence(next(self.seq_ids), parent.token_ids[:keep], cache_salt=parent.cache_salt)
        child.num_encoder_tokens = parent.num_encoder_tokens
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_cached_tokens = 0
        self.manager.fork(parent, child)
        assert child.num_slots == parent.num_slots == 0
        self.running.append(child)
        self.encoded.add(child)
        self.touched |= {parent, child}
        self.totals["forks"] += 1
        self.totals["forks of several groups"] += len(self.specs) > 1
        return child

    def forget(self, seq: ToySequence) -> None:
        assert (seq.block_tables, seq.first_blocks, seq.num_slots, seq.num_published, seq.prefix) == (
            [],
            [],
            0,
            0,
            None,
        )
        self.running.remove(seq)
        self.touched.discard(seq)
        self.encoded.discard(seq)
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
        tokens = all_tokens(seq)[:end] + self.drafts_of(seq, count)
        encodes = seq not in self.encoded
        self.encoded.add(seq)
        tables = [list(table) for table in seq.block_tables]
        return Row(seq, self.admissions[seq], tables, tokens, seq.num_computed_tokens, encodes)

    def launch_behind(
        self,
        skip: set[int],
        chunk: int,
        tokens: list[int],
        *,
        fate: str = "good",
        num_done: int = 99,
        fork: bool = False,
        poison: bool = False,
    ) -> None:
        """A plan more on its way. Who has all its tokens in it gets another, which nobody knows yet; its prompt may fork."""
        for seq in list(self.drafts):
            self.trim_one(seq)
        rows = self.plan_rows(skip, chunk)
        sampled = [seq for seq, count in rows.items() if count == seq.num_uncomputed_tokens]
        plan_of = {seq: seq.num_computed_tokens for seq in rows}
        for seq, count in rows.items():
            seq.num_computed_tokens += count
        forks = []
        if fork and sampled and not sampled[0].coming and len(self.running) < 8:
            forks.append((sampled[0], self.fork_one(sampled[0], True)))
            sampled.append(forks[0][1])
        after = {seq: seq.num_computed_tokens for seq in rows}
        for seq in rows:
            seq.num_computed_tokens = plan_of[seq]
        plan = self.launch(rows, fate=fate, num_done=num_done, poison=poison and fate == "good")
        for seq in rows:
            seq.num_computed_tokens = after[seq]
        plan.sampled, plan.forks = sampled, forks
        for seq, token in zip(sampled, tokens, strict=False):
            seq.coming.append(token)
            if self.manager.groups.forget:
                seq.num_slots = 0  # it gives back what only its prompt has seen
        del sampled[len(tokens) :]
        self.totals["plans behind others"] += len(self.device.plans) > 1

    def land(self) -> None:
        """Take the result of the oldest plan."""
        plan = self.device.land()
        if plan.fate == "good":
            self._take_result(plan)
        else:
            self._take_back(plan)
        self.totals["steps"] += 1

    def _take_result(self, plan: ToyPlan) -> None:
        self.manager.commit(self.device.take_answers())
        for row in plan.rows:
            is_alive = row.seq in self.running and row.life == self.admissions[row.seq]
            assert row.fault != GARBAGE or not is_alive, "who has read what was never written has fallen"
        for seq in plan.sampled:
            if seq in self.running or seq in self.waiting:
                seq.token_ids.append(seq.coming.pop(0))
        spoilt = [row.seq for row in plan.rows if row.fault and row.fault != GARBAGE]
        for seq in [*spoilt, *(child for parent, child in plan.forks if parent in spoilt)]:
            self.manager.condemn(seq)  # its logits are NaN, whatever has become of it meanwhile
            self.totals["condemned"] += 1
            if seq in self.running:
                self.forget(seq)
            self.end(seq)

    def _take_back(self, plan: ToyPlan) -> None:
        everybody = list(dict.fromkeys([*(row.seq for row in plan.rows), *plan.others, *plan.sampled]))
        before = list(self.running)
        num_others = self._num_fallen_for_what_they_hold(everybody)
        fallen = self.manager.rollback(everybody, self.running)
        assert fallen[: len(everybody)] == everybody
        others = fallen[len(everybody) :]
        assert set(others) <= set(before) - set(everybody)
        self.totals["fallen with others"] += len(others)
        self.totals["fallen for what they had forgotten"] += len(fallen) - num_others
        self.totals["failed plans"] += 1
        for seq in fallen:
            self.end(seq)
        for seq in self.waiting:  # preempted: what is on its way may come from what was never written
            seq.coming.clear()
            for later in self.device.plans:
                later.sampled = [other for other in later.sampled if other is not seq]

    def _num_fallen_for_what_they_hold(self, everybody: list[ToySequence]) -> int:
        """How many would fall with the oldest plan if nothing had been forgotten since."""
        plans = [*self.manager._in_flight, self.manager._plan]
        forgotten = [plan.forgotten for plan in plans]
        for plan in plans:
            plan.forgotten = []
        fallen, _ = find_fallout(plans[0], plans[1:], self.manager.pool, everybody, self.running)  # type: ignore[arg-type]
        for plan, had in zip(plans, forgotten, strict=True):
            plan.forgotten = had
        return len(fallen)

    def land_all(self) -> None:
        while self.device.plans:
            self.land()

    def plan_rows(self, skip: set[int], chunk: int) -> dict[ToySequence, int]:
        """Who is in the plan with how many tokens; what that completes is published, as the scheduler does."""
        rows = {}
        for i, seq in enumerate(self.running):
            count = min(chunk, seq.num_uncomputed_tokens, self.most_new)
            if i in skip or not count:
                continue
            if self.manager.groups.forget and seq.num_uncomputed_tokens > 1:
                has_room = self._make_room(seq, 1)
            else:
                has_room = seq.num_computed_tokens + count <= seq.num_slots or self._make_room(seq)
            if not has_room:
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

    def choose(self, seqs: list[ToySequence], which: int) -> ToySequence:
        self.totals["rules"] += 1
        return seqs[which % len(seqs)]

    # ---- its end

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
        self._count()

    def _count(self) -> None:
        """What happened in this life."""
        totals, stats = self.totals, self.manager.stats
        totals["lives"] += 1
        totals["evictions"] += stats.num_evicted_blocks
        totals["bad files"] += stats.num_bad_files
        totals["disk hits"] += stats.hits_by_tier[Tier.DISK]
        totals[f"rules in lives of {len(self.specs)} groups"] += totals["rules"] - self.first_rule
        for spec, group in zip(self.specs, stats.groups, strict=True):
            totals["forgotten"] += group.num_forgotten_blocks
            if spec.forgets:
                totals["hit blocks of groups that forget"] += group.num_hit_blocks
                totals["copies of groups that forget"] += group.num_copied_blocks
                totals["saves of groups that forget"] += group.num_saved_blocks
                totals["loads of groups that forget"] += group.num_loaded_blocks
                totals["reads of groups that forget"] += group.num_read_files
