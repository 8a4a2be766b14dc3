"""Scheduler: who runs in the next step, with how many tokens, and who gives its blocks back.

Prefill goes before decode, first come first served. A running sequence always arrived before every waiting one, so the
newest running sequence is the last in its list, and a preempted one belongs at the front of the queue.

A batch may be made while others are still on their way: what they compute counts as computed, and UNKNOWN stands for what they
sample. A batch depends on lengths only, and they are known. What is not is whether a sequence will turn out to have ended: then
its token of a later batch is dropped when it comes. Batches are executed in order, so blocks and rows may be given to others at
once: whatever a batch on its way still writes there, it writes before them.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import repeat
from typing import NamedTuple

from nanoengine.engine.beam_search import Choice
from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.messages import UNKNOWN, Phase, SampledBatch, ScheduledBatch
from nanoengine.engine.preemption import Preemption
from nanoengine.engine.sequence import NO_ROW, Sequence, Status
from nanoengine.outputs import FinishReason


class InFlight(NamedTuple):
    """A batch that was handed out: whose tokens it computes, and for whom it samples one."""

    batch: ScheduledBatch
    computed: list[Sequence]
    sampled: list[Sequence]


class Scheduler:
    """Policy of the engine: `schedule` makes a batch, then `update` takes its results, or `fail` drops it.

    Args:
        block_manager: holds the KV pool; it can hold one sequence of `max_model_len` tokens at least.
        max_num_seqs: most running sequences.
        max_num_batched_tokens: most tokens in one step, which also bounds the running sequences.
        max_model_len: longest sequence in tokens; generation ends there.
        preemption: whether the blocks of a victim are worth copying to host memory.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        preemption: Preemption | None = None,
    ):
        assert block_manager.blocks_for(max_model_len) <= block_manager.pool.num_blocks, "the pool holds one sequence"
        self.block_manager = block_manager
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemption = Preemption() if preemption is None else preemption
        self.num_preemptions = 0
        self.num_forks = 0
        self._begun: Sequence | None = None  # the sequence of which the last prefill step computed only a chunk
        self._in_flight: deque[InFlight] = deque()  # the oldest first
        self._free_rows = list(range(self.max_num_seqs))[::-1]
        self.held: set[Sequence] = set()  # running, but not to be decoded before `refork`
        self._complete: set[Sequence] = set()  # running, but their last token is on its way

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_in_flight(self) -> int:
        """Batches whose results were not taken yet."""
        return len(self._in_flight)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. Its prompt is shorter than `max_model_len`: the engine has checked it."""
        assert 0 < seq.num_tokens < self.max_model_len
        seq.limit_length(self.max_model_len)
        self.waiting.append(seq)

    # ---- making a batch

    def schedule(self) -> ScheduledBatch:
        """The next step. Empty if there is nothing to do before the results of those on their way."""
        step = self._schedule_prefill()
        if not step.batch and self.running:
            step = self._schedule_decode()
        if step.batch:
            step.batch.transfers = self.block_manager.take_transfers()
            self._in_flight.append(step)
        return step.batch

    def _schedule_prefill(self) -> InFlight:
        step = InFlight(ScheduledBatch(Phase.PREFILL), [], [])
        budget = self.max_num_batched_tokens
        if self._begun is not None:
            budget -= self._take_prompt(step, self._begun, budget)
        while budget and self.waiting and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if seq.num_known_tokens < seq.num_tokens:  # preempted while a token of it was on its way
                break
            num_cached = self.block_manager.admit(seq)
            if num_cached is None:
                break
            self._start(self.waiting.popleft(), num_cached)
            budget -= self._take_prompt(step, seq, budget)
        return step

    def _start(self, seq: Sequence, num_cached: int) -> None:
        self.running.append(seq)
        seq.row = self._free_rows.pop()
        seq.status = Status.RUNNING
        seq.num_computed_tokens = num_cached
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = num_cached

    def _take_prompt(self, step: InFlight, seq: Sequence, budget: int) -> int:
        """Put the next tokens of a sequence into a batch, as many as are uncomputed and fit; returns how many."""
        batch = step.batch
        start = seq.num_computed_tokens
        count = min(budget, seq.num_uncomputed_tokens)
        batch.seq_ids.append(seq.seq_id)
        batch.rows.append(seq.row)
        batch.token_ids += seq.token_ids[start : start + count]
        batch.num_computed_tokens.append(start)
        batch.num_new_tokens.append(count)
        batch.block_tables.append(seq.block_table)
        # Published now and not after the step: sequences of the same step may share these blocks, because every backend
        # writes the K/V of the whole batch in a layer before any attention of that layer reads.
        self.block_manager.publish(seq, start + count, settled=False)
        seq.num_computed_tokens += count
        step.computed.append(seq)
        if seq.num_uncomputed_tokens:
            self._begun = seq
        else:
            self._begun = None
            self._fork(step, seq)
        return count

    def _sample(self, step: InFlight, seq: Sequence) -> None:
        """Sample a token for a sequence from the last row of the batch."""
        batch = step.batch
        batch.sampled_rows.append(len(batch) - 1)
        batch.sampled_into.append(seq.row)
        batch.sampling.append(seq.sampling)
        step.sampled.append(seq)
        seq.token_ids.append(UNKNOWN)
        if seq.num_tokens >= seq.next_check:
            self._look_ahead(seq)

    def _look_ahead(self, seq: Sequence) -> None:
        """A token is on its way to a sequence: see what its new length means."""
        if seq.num_tokens == seq.max_num_tokens:
            self._complete.add(seq)
        else:
            seq.plan_next_check()

    def _fork(self, step: InFlight, parent: Sequence) -> None:
        """Sample the first token of a prompt, and start the completions that wait for it: they share its blocks, and sample
        from the same row.

        Those that `max_num_seqs` leaves no room for start later, like any sequence, with what the prefix cache has.
        """
        children = []
        while self.waiting and self.waiting[0].fork_of is parent and len(self.running) < self.max_num_seqs:
            if max(self.waiting[0].num_tokens, parent.num_tokens) > parent.num_prompt_tokens:  # resumed: copies no more
                break
            child = self.waiting.popleft()
            self._start(child, parent.num_tokens)  # computed in this step
            self.block_manager.fork(parent, child)
            children.append(child)
            self.num_forks += 1
        for seq in (parent, *children):
            self._sample(step, seq)

    def _schedule_decode(self) -> InFlight:
        running, held = self.running, self.held | self._complete
        i = 0
        while i < len(running):  # oldest first; victims come off the other end
            seq = running[i]
            i += 1
            if len(seq.token_ids) > seq.num_slots and seq not in held:
                while not self.block_manager.allocate_slots(seq):
                    if self._preempt_newest() is seq:
                        break
        rows = [seq for seq in running if seq not in held] if held else running.copy()
        into = [seq.row for seq in rows]
        batch = ScheduledBatch(
            Phase.DECODE,
            seq_ids=[seq.seq_id for seq in rows],
            rows=into,
            token_ids=[seq.token_ids[-1] for seq in rows],
            num_computed_tokens=[seq.num_computed_tokens for seq in rows],
            num_new_tokens=[1] * len(rows),
            block_tables=[seq.block_table for seq in rows],
            sampled_rows=list(range(len(rows))),
            sampled_into=into,
            sampling=[seq.sampling for seq in rows],
        )
        for seq in rows:
            seq.num_computed_tokens += 1
            tokens = seq.token_ids
            tokens.append(UNKNOWN)
            if len(tokens) >= seq.next_check:
                self._look_ahead(seq)
        return InFlight(batch, rows, rows)

    def _preempt_newest(self) -> Sequence:
        """Take the blocks of the newest running sequence and put it at the front of the queue, to be resumed later."""
        seq = self.running.pop()
        if seq in self.held:  # it will sample its last token again, when it is resumed
            self.held.remove(seq)
            seq.token_ids.pop()
            seq.num_known_tokens -= 1
            seq.logprobs.pop()
        if self.preemption.prefers_swap(seq.num_computed_tokens):
            self.block_manager.swap_out(seq)
        else:
            self.block_manager.free(seq)
        self._complete.discard(seq)
        self._free_row(seq)
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        seq.status = Status.WAITING
        self.waiting.appendleft(seq)
        self.num_preemptions += 1
        return seq

    def _free_row(self, seq: Sequence) -> None:
        if seq.row != NO_ROW:
            self._free_rows.append(seq.row)
            seq.row = NO_ROW

    # ---- after the step

    def update(self, batch: ScheduledBatch, sampled: SampledBatch) -> list[Sequence]:
        """Take the results of the oldest batch in flight: fill its tokens in, finish; returns who got a token, or none but should
        have, and has ended with an error.
        """
        in_flight = self._in_flight.popleft()
        assert in_flight.batch is batch, "results are taken in the order of the batches"
        self.block_manager.commit(sampled.unwritten)
        ended = Status.FINISHED
        all_logprobs = sampled.logprobs or repeat(None)
        advanced = []
        for seq, token, logprobs in zip(in_flight.sampled, sampled.token_ids, all_logprobs, strict=False):
            if seq.status is ended:  # while the batch was on its way
                continue
            advanced.append(seq)
            if token < 0:
                self.finish(seq, "error")
                continue
            known = seq.num_known_tokens
            seq.token_ids[known] = token
            seq.num_known_tokens = known = known + 1
            if logprobs is not None:
                seq.logprobs.append(logprobs)
            if token in seq.stop_token_ids:  # before min_tokens they are banned, not sampled
                self.finish(seq, "stop", token if token in seq.params.stop_token_ids else None)
            elif known == seq.max_num_tokens:
                self.finish(seq, "length")
        return advanced

    def fail(self) -> list[Sequence]:
        """End the sequences of the oldest batch in flight, because its step raised, and those that share what it was to write."""
        in_flight = self._in_flight.popleft()
        spoilt = self.block_manager.rollback()
        sharing = (seq for seq in self.running if not spoilt.isdisjoint(seq.block_table)) if spoilt else ()
        failed = [seq for seq in dict.fromkeys([*in_flight.computed, *in_flight.sampled, *sharing]) if not seq.finished]
        for seq in failed:
            self.finish(seq, "error")
        return failed

    def last_batch(self) -> ScheduledBatch:
        """Nothing to compute, only the copies that keep the cache beyond the end of this engine."""
        self.block_manager.tiers.write_all()
        return ScheduledBatch(Phase.DECODE, transfers=self.block_manager.take_transfers())

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence, wherever it stands, and take its blocks back. Nothing happens if it has ended already."""
        if seq.finished:
            return
        (self.running if seq.status is Status.RUNNING else self.waiting).remove(seq)
        if seq is self._begun:
            self._begun = None
        self.held.discard(seq)
        self._complete.discard(seq)
        self._free_row(seq)
        self.block_manager.free(seq)
        seq.forget_unknown_tokens()
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason

    # ---- beams

    def hold(self, seq: Sequence) -> None:
        """Let a sequence keep its blocks, but decode no more until `refork`."""
        assert seq.status is Status.RUNNING
        self.held.add(seq)

    def refork(self, seqs: list[Sequence], choices: list[Choice]) -> None:
        """Make each of some held sequences of equal length a fork of one of them, with a new last token, and let it go on."""
        assert all(seq in self.held for seq in seqs)
        prefixes = [seq.token_ids[:-1] for seq in seqs]
        self.block_manager.refork(seqs, [seqs[choice.parent] for choice in choices])
        for seq, choice in zip(seqs, choices, strict=True):
            seq.token_ids = [*prefixes[choice.parent], choice.token]
            seq.num_known_tokens = seq.num_tokens
            seq.logprobs = []
            self.held.remove(seq)

    def check(self) -> None:
        """Raise AssertionError if an invariant of the scheduler or of the pool is broken."""
        pool = self.block_manager.pool
        self.block_manager.check()
        assert self.held <= set(self.running)
        references = [0] * (pool.num_blocks + 1)
        for seq in self.running:
            assert seq.status is Status.RUNNING
            assert seq.num_computed_tokens <= seq.num_tokens <= seq.max_num_tokens
            assert (seq in self._complete) == (seq.num_tokens == seq.max_num_tokens)
            assert len(set(seq.block_table)) == len(seq.block_table)
            assert len(seq.block_table) >= self.block_manager.blocks_for(seq.num_computed_tokens)
            for block in seq.block_table:
                references[block] += 1
        for seq in self.waiting:
            assert seq.status is Status.WAITING
            assert not seq.block_table
            assert seq.num_computed_tokens == 0
            assert seq.row == NO_ROW
        rows = [seq.row for seq in self.running]
        assert sorted(rows + self._free_rows) == list(range(self.max_num_seqs)), "a row has one owner"
        on_their_way = Counter(seq for step in self._in_flight for seq in step.sampled if not seq.finished)
        for seq in [*self.running, *self.waiting]:
            assert seq.num_tokens - seq.num_known_tokens == on_their_way[seq]
        assert references == pool.ref_counts, "the references of the pool are those of the running sequences"
        assert len(self.running) <= self.max_num_seqs
        order = [seq.seq_id for seq in [*self.running, *self.waiting]]
        assert order == sorted(order), "running sequences are older than waiting ones, each list oldest first"
