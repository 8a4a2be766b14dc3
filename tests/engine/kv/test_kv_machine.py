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

from tests.engine.kv.kv_life import KVLife

LONG = os.environ.get("NANOENGINE_LONG_TESTS") == "1"
PROFILE = settings(
    max_examples=8000 if LONG else 25,
    stateful_step_count=100,
    deadline=None,
    database=None,
    derandomize=not LONG,
    suppress_health_check=list(HealthCheck),
)


class KVMachine(KVLife):
    """Between two plans the manager is asked for anything; plans are executed later, in order, or fail."""

    @rule(
        prompts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 1), st.integers(0, 13)), min_size=1, max_size=2)
    )
    def admit(self, prompts: list[tuple[int, int, int]]) -> None:
        """Few different prompts, so that prefixes meet; some do not fit."""
        self.totals["rules"] += 1
        for length, family, change in prompts:
            room = self.longest
            prompt = [family] * (1 + length % (room if length > 30 else 1 + room // 2))
            if change < len(prompt):
                prompt[change] = 9
            salt = "s" if change == 12 else ""
            self.admit_one(self.new_sequence(prompt, salt, reads_cache=change != 13))

    @precondition(lambda self: self.admissible())
    @rule(which=st.integers(0, 99))
    def resume(self, which: int) -> None:
        seq = self.choose(self.admissible(), which)
        self.waiting.remove(seq)
        self.admit_one(seq)

    @rule(
        family=st.integers(0, 3),
        length=st.integers(5, 40),
        num_files=st.sampled_from([99, 99, 99, 2, 0]),
        stay=st.booleans(),
    )
    def serve_one(self, family: int, length: int, num_files: int, stay: bool) -> None:
        """A whole prompt, from the files that continue it to its end; room is made for it, and those files do not break."""
        self.totals["rules"] += 1
        for seq in list(self.running):
            self.preempt_one(seq, stay)
        seq = self.new_sequence([family] * min(length, self.longest - 1))
        for _ in range(2):
            self.admit_one(seq)
            self.launch({})
            self.device.do_files(num_files)
            self.land_all()
            if seq not in self.admissible():
                break
            self.waiting.remove(seq)
        while seq in self.running and seq.num_uncomputed_tokens:
            self.run_step(set(), 99, 0)
        if seq in self.running and not stay:
            self.manager.free(seq)
            self.forget(seq)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 99), sure=st.integers(0, 2))
    def cancel(self, which: int, sure: int) -> None:
        """A sequence ends while it waits, perhaps for files."""
        if sure == 2:
            seq = self.choose(self.waiting, which)
            self.totals["cancelled fetches"] += self.manager.is_fetching(seq)
            self.end(seq)

    @precondition(lambda self: self.ready())
    @rule(which=st.integers(0, 99), token=st.integers(0, 2), lookahead=st.sampled_from([0, 0, 1, 2, 5]))
    def append(self, which: int, token: int, lookahead: int) -> None:
        """A sampled token, and room for it and for drafts behind it."""
        self.append_one(self.choose(self.ready(), which), token, min(lookahead, self.most_new - 1))

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
                drafts = min(lookahead, self.most_new - 1)
                while seq in self.running and not self.append_one(seq, (token + seq.seq_id) % 3, drafts):
                    self.preempt_one(self.running[-1], swap)
            self.run_step(set(), 1, accept)

    @precondition(lambda self: self.admissible())
    @rule(swap=st.booleans(), chunk=st.integers(3, 20))
    def serve(self, swap: bool, chunk: int) -> None:
        """The oldest makes room, those that wait come back, and their tokens are computed."""
        self.totals["rules"] += 1
        if self.running:
            self.preempt_one(self.running[0], swap)
        for seq in self.admissible()[:4]:
            self.waiting.remove(seq)
            self.admit_one(seq)
        self.run_step(set(), chunk, 0)

    @precondition(lambda self: self.begun() and len(self.running) < 8)
    @rule(which=st.integers(0, 99), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def fork(self, which: int, tokens: list[int]) -> None:
        """Children of the same computed tokens; each goes on with a token of its own, and so does the parent."""
        parent = self.choose(self.begun(), which)
        self.manager.publish(parent, parent.num_computed_tokens)
        family = [parent, *(self.fork_one(parent, bool(which % 2)) for _ in tokens)]
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
            if any(len(seq.block_tables[g]) > seq.num_computed_tokens // self.size + 1 for g in self.growing):
                self.trim_one(seq)
        tokens = [list(seq.token_ids) for seq in seqs]
        chosen = [parents[i % len(parents)] % len(seqs) for i in range(len(seqs))]
        self.manager.refork(seqs, [seqs[number] for number in chosen])
        for seq, number in zip(seqs, chosen, strict=True):
            seq.token_ids = list(tokens[number])
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

    @rule(sure=st.integers(0, 9))
    def reset(self, sure: int) -> None:
        """Also while plans and files are on their way."""
        if sure < 9:
            return
        self.totals["rules"] += 1
        done = self.manager.reset_prefix_cache()
        assert done == (not self.running)
        if done:
            assert not self.manager.pool.index
            self.totals["resets"] += 1

    @rule(sure=st.integers(0, 19))
    def save_all(self, sure: int) -> None:
        if sure == 19:
            self.manager.save_all()

    @rule(skip=st.sets(st.integers(0, 7), max_size=3), chunk=st.integers(1, 9), accept=st.integers(0, 5))
    def step(self, skip: set[int], chunk: int, accept: int) -> None:
        """Copies first, then the new tokens of some sequences; of the drafts, some are accepted."""
        self.totals["rules"] += 1
        self.run_step(skip, chunk, accept)

    @precondition(lambda self: len(self.device.plans) < 3)
    @rule(
        skip=st.sets(st.integers(0, 7), max_size=2),
        chunk=st.sampled_from([1, 3, 9, 99]),
        tokens=st.lists(st.integers(0, 2), min_size=8, max_size=8),
        fate=st.sampled_from(["good"] * 6 + ["broken", "never begun"]),
        num_done=st.sampled_from([0, 1, 2, 99]),
        fork=st.booleans(),
        poison=st.integers(0, 9),
    )
    def launch_one(
        self, skip: set[int], chunk: int, tokens: list[int], fate: str, num_done: int, fork: bool, poison: int
    ) -> None:
        """A plan more on its way. Who has all its tokens in it gets another, which nobody knows yet; its prompt may fork."""
        self.totals["rules"] += 1
        self.launch_behind(skip, chunk, tokens, fate=fate, num_done=num_done, fork=fork, poison=poison == 9)

    @rule(
        family=st.integers(0, 3),
        length=st.integers(3, 30),
        more=st.integers(1, 20),
        fate=st.sampled_from(["broken", "never begun"]),
        num_done=st.sampled_from([0, 1, 99]),
        fork=st.booleans(),
        stay=st.booleans(),
    )
    def share_what_breaks(
        self, family: int, length: int, more: int, fate: str, num_done: int, fork: bool, stay: bool
    ) -> None:
        """A prompt that breaks, and another that shares it and has gone on behind it before that is known."""
        self.totals["rules"] += 1
        self.land_all()
        for seq in list(self.running):
            self.preempt_one(seq, stay)
        length = min(length, self.most_new, self.longest // 2)
        more = min(more, self.longest - length - 1)
        first = self.new_sequence([family + 4] * max(length, 1))
        self.admit_one(first)
        self.launch_behind(set(), 99, [0] * 8, fate=fate, num_done=num_done)
        second = self.new_sequence([*first.token_ids, *[8] * max(more, 1)])
        second.cache_salt, second.num_encoder_tokens = first.cache_salt, first.num_encoder_tokens
        self.admit_one(second)
        self.launch_behind(set(), 99, [0] * 8)
        if not stay and first in self.running:
            self.manager.free(first)
            self.forget(first)
        self.launch_behind(set(), 99, [0] * 8, fork=fork)
        if more % 2:
            self.land()

    @precondition(lambda self: self.device.plans)
    @rule()
    def land_one(self) -> None:
        self.totals["rules"] += 1
        self.land()

    @precondition(lambda self: self.device.plans)
    @rule()
    def execute_one(self) -> None:
        """The device gets there before anybody asks."""
        self.device.execute(self.device.plans[0])

    @precondition(lambda self: self.device.jobs)
    @rule(count=st.integers(1, 5), broken=st.sampled_from([False] * 5 + [True]))
    def do_files(self, count: int, broken: bool) -> None:
        self.totals["rules"] += 1
        self.device.do_files(count, broken=broken)

    @precondition(lambda self: self.device.files)
    @rule(which=st.integers(0, 99), delete=st.booleans(), sure=st.integers(0, 4))
    def damage_a_file(self, which: int, delete: bool, sure: int) -> None:
        if sure < 4:
            return
        path = sorted(self.device.files)[which % len(self.device.files)]
        if delete:
            del self.device.files[path]
        else:
            self.device.files[path] = (b"", {})


TIERS = {
    "no tier": ([0], [0]),
    "host memory": ([1, 2, 4], [0]),
    "disk behind a small host tier": ([1, 2], [2, 5, 50]),
    "host memory and disk": ([4, 8], [5, 50]),
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
    assert totals["rules"] >= (300_000 if LONG else 500)
    if LONG:  # in a few lives, not all of it need happen; tests of their own see to that
        assert totals["rules in lives of 2 groups"] + totals["rules in lives of 3 groups"] >= 200_000
        events = {"forks", "reforks", "copies", "hits", "evictions", "swaps", "resets"}
        events |= {"forgotten", "hits without their beginning", "evictions that leave other groups"}
        events |= {"forks of several groups", "copies of groups that forget", "hit blocks of groups that forget"}
        events |= {"fallen for what they had forgotten"}
        events |= {"failed plans", "fallen with others", "condemned", "plans behind others"}
        events |= {"failed admissions", "failed growth"}
        if tiers != "no tier":
            events |= {"saves", "loads", "saves of groups that forget", "loads of groups that forget"}
        if "disk" in tiers:
            events |= {"fetches", "cancelled fetches", "reads", "writes", "bad files", "disk hits"}
            events |= {"reads of groups that forget"}
        assert {name for name in events if not totals[name]} == set(), "everything that can happen does"
