"""Random lives of a BlockManager with lower tiers, against a simulated memory that shows what every slot really holds."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from nanoengine.engine.sequence import Sequence
from nanoengine.sampling_params import SamplingParams
from tests.engine.kv.kv_life import KVLife

LONG = os.environ.get("NANOENGINE_LONG_TESTS") == "1"
PROFILE = settings(
    max_examples=1000 if LONG else 25,
    stateful_step_count=100,
    deadline=None,
    database=None,
    derandomize=not LONG,
    suppress_health_check=list(HealthCheck),
)


class KVMachine(KVLife):
    """Between two steps the manager is asked for anything; a step makes the transfers and writes, or fails."""

    @rule(
        prompts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 1), st.integers(0, 12)), min_size=1, max_size=2)
    )
    def admit(self, prompts: list[tuple[int, int, int]]) -> None:
        """Few different prompts, so that prefixes meet; some do not fit."""
        self.totals["rules"] += 1
        for length, family, change in prompts:
            room = self.manager.pool.num_blocks * self.size
            prompt = [family] * (1 + length % (room if length > 30 else 1 + room // 2))
            if change < len(prompt):
                prompt[change] = 9
            salt = "s" if change == 12 else ""
            self.admit_one(Sequence(next(self.seq_ids), prompt, SamplingParams(), cache_salt=salt))

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 99))
    def resume(self, which: int) -> None:
        self.totals["rules"] += 1
        self.admit_one(self.waiting.pop(which % len(self.waiting)))

    @precondition(lambda self: self.ready())
    @rule(which=st.integers(0, 99), token=st.integers(0, 2), lookahead=st.sampled_from([0, 0, 1, 2, 5]))
    def append(self, which: int, token: int, lookahead: int) -> None:
        """A sampled token, and room for it and for drafts behind it."""
        self.append_one(self.choose(self.ready(), which), token, lookahead)

    @precondition(lambda self: self.ready())
    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        lookahead=st.integers(0, 3),
        accept=st.integers(0, 3),
        swap=st.booleans(),
    )
    def decode(self, tokens: list[int], lookahead: int, accept: int, swap: bool) -> None:
        """Whole decode steps of all that are ready: the newest gives way to who finds no block."""
        self.totals["rules"] += 1
        for token in tokens:
            for seq in self.ready():
                while seq in self.running and not self.append_one(seq, (token + seq.seq_id) % 3, lookahead):
                    self.preempt_one(self.running[-1], swap)
            self.run_step(set(), 1, accept)

    @precondition(lambda self: self.waiting)
    @rule(swap=st.booleans(), chunk=st.integers(3, 20))
    def serve(self, swap: bool, chunk: int) -> None:
        """The oldest makes room, those that wait come back, and their tokens are computed."""
        self.totals["rules"] += 1
        if self.running:
            self.preempt_one(self.running[0], swap)
        for seq in self.waiting[:4]:
            self.waiting.remove(seq)
            self.admit_one(seq)
        self.run_step(set(), chunk, 0)

    @precondition(lambda self: self.begun() and len(self.running) < 8)
    @rule(which=st.integers(0, 99), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def fork(self, which: int, tokens: list[int]) -> None:
        """Children of the same computed tokens; each goes on with a token of its own, and so does the parent."""
        parent = self.choose(self.begun(), which)
        self.manager.publish(parent, parent.num_computed_tokens)
        family = [parent]
        for _ in tokens:
            keep = parent.num_tokens if which % 2 else parent.num_computed_tokens
            child = Sequence(next(self.seq_ids), parent.token_ids[:keep], SamplingParams())
            child.cache_salt = parent.cache_salt
            child.num_computed_tokens = parent.num_computed_tokens
            child.num_cached_tokens = 0
            self.manager.fork(parent, child)
            self.running.append(child)
            family.append(child)
            self.totals["forks"] += 1
        self.touched.update(family)
        for seq, token in zip(family, [0, *tokens], strict=True):
            if not seq.num_uncomputed_tokens:
                self.append_one(seq, token, 0)

    @precondition(lambda self: len(self.prefilled()) > 1)
    @rule(which=st.integers(0, 99), parents=st.lists(st.integers(0, 99), min_size=8, max_size=8))
    def refork(self, which: int, parents: list[int]) -> None:
        """Beams that have their next token, or all but it, change places."""
        first = self.choose(self.prefilled(), which)
        seqs = [
            seq
            for seq in self.prefilled()
            if seq.num_tokens == first.num_tokens
            and seq.num_computed_tokens == first.num_computed_tokens
            and seq.cache_salt == first.cache_salt
        ]
        for seq in seqs:
            if len(seq.block_table) > seq.num_computed_tokens // self.size + 1:
                self.trim_one(seq)
        tokens = [list(seq.token_ids) for seq in seqs]
        chosen = [parents[i % len(parents)] % len(seqs) for i in range(len(seqs))]
        self.manager.refork(seqs, [seqs[number] for number in chosen])
        for seq, number in zip(seqs, chosen, strict=True):
            seq.token_ids = list(tokens[number])
            seq.num_known_tokens = seq.num_tokens
        self.touched |= set(seqs)
        self.totals["reforks"] += len(seqs) > 1

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def free(self, which: int) -> None:
        seq = self.choose(self.running, which)
        self.manager.free(seq)
        self.forget(seq)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), swap=st.booleans())
    def preempt(self, which: int, swap: bool) -> None:
        self.preempt_one(self.choose(self.running, which), swap)

    @precondition(lambda self: self.drafts)
    @rule(which=st.integers(0, 99))
    def trim(self, which: int) -> None:
        self.trim_one(self.choose(sorted(self.drafts, key=lambda seq: seq.seq_id), which))

    @precondition(lambda self: not self.touched and not self.manager.tiers.transfers)
    @rule(sure=st.integers(0, 9))
    def reset(self, sure: int) -> None:
        if sure < 9:
            return
        self.totals["rules"] += 1
        done = self.manager.reset_prefix_cache()
        assert done == (not self.running)
        if done:
            assert not self.manager.pool.index
            self.memory.blocks.clear()
            self.totals["resets"] += 1

    @rule(skip=st.sets(st.integers(0, 7), max_size=3), chunk=st.integers(1, 9), accept=st.integers(0, 5))
    def step(self, skip: set[int], chunk: int, accept: int) -> None:
        """Copies first, then the new tokens of some sequences; of the drafts, some are accepted."""
        self.totals["rules"] += 1
        self.run_step(skip, chunk, accept)

    @precondition(lambda self: self.running)
    @rule(
        skip=st.sets(st.integers(0, 7), max_size=3),
        chunk=st.integers(1, 9),
        num_done=st.sampled_from([0, 0, 1, 2, 4, 99]),
        swap=st.booleans(),
        sure=st.integers(0, 2),
    )
    def failing_step(self, skip: set[int], chunk: int, num_done: int, swap: bool, sure: int) -> None:
        """It breaks after some of its copies and leaves garbage; what was promised for it is taken back."""
        if sure < 2:
            return
        for seq in self.ready():
            self.append_one(seq, 1, 0)
        if swap and len(self.running) > 1:
            self.preempt_one(self.running[-1], swap)
        self.totals["rules"] += 1
        rows = self.plan_rows(skip, chunk)
        transfers = self.manager.take_transfers()
        self.make_transfers(transfers[:num_done])
        self.memory.spoil(transfers[num_done:])
        for seq, count in rows.items():
            self.memory.write_garbage(seq, seq.num_computed_tokens, seq.num_computed_tokens + count)
        self.manager.rollback()
        for seq in [seq for seq in self.running if seq in rows or seq in self.touched]:
            self.manager.free(seq)
            self.forget(seq)
        self.touched.clear()
        self.totals["failed steps"] += 1


TIERS = {
    "no tier": ([0], [0]),
    "host memory": ([1, 2, 4], [0]),
    "disk": ([0], [2, 5, 50]),
    "host memory and disk": ([1, 3], [2, 50]),
}


def run_machine(tiers: str, folder: Path) -> Counter[str]:
    """Many lives with these tiers; returns what happened in them."""
    totals: Counter[str] = Counter()
    host, disk = TIERS[tiers]
    run_state_machine_as_test(partial(KVMachine, folder, totals, host, disk), settings=PROFILE)  # type: ignore[arg-type]
    return totals


@pytest.mark.parametrize("tiers", TIERS)
def test_in_any_life_every_table_reads_back_its_own_tokens(tiers: str, tmp_path: Path) -> None:
    totals = run_machine(tiers, tmp_path)
    assert totals["rules"] >= (30_000 if LONG else 500)
    if LONG:
        events = {"forks", "reforks", "copies", "hits", "evictions", "swaps", "resets"}
        events |= {"failed steps", "failed admissions", "failed growth"} | (set() if tiers == "no tier" else {"loads"})
        assert {name for name in events if not totals[name]} == set(), "everything that can happen does"
