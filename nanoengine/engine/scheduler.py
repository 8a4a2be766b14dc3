"""Scheduler: who runs in the next step, with how many tokens, and who gives its blocks back.

Prefill goes before decode, first come first served. A running sequence always arrived before every waiting one, so the
newest running sequence is the last in its list, and a preempted one belongs at the front of the queue.
"""

from __future__ import annotations

from collections import deque

from nanoengine.engine.beam_search import Choice
from nanoengine.engine.block_manager import BlockManager
from nanoengine.engine.messages import Phase, SampledBatch, ScheduledBatch
from nanoengine.engine.preemption import Preemption
from nanoengine.engine.sequence import Sequence, Status
from nanoengine.outputs import FinishReason


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
        self._in_flight: list[Sequence] = []  # the rows of the batch that was handed out
        self._sampled: list[Sequence] = []  # whose tokens that batch samples
        self.held: set[Sequence] = set()  # running, but not to be decoded before `refork`
        self._aborted = False  # one of them was aborted meanwhile

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. Its prompt is shorter than `max_model_len`: the engine has checked it."""
        assert 0 < seq.num_tokens < self.max_model_len
        seq.plan_next_check(self.max_model_len)
        self.waiting.append(seq)

    # ---- making a batch

    def schedule(self) -> ScheduledBatch:
        """The next step. Empty only if there is nothing to do."""
        assert not self._in_flight, "one batch at a time"
        batch = self._schedule_prefill()
        if not batch and self.running:
            batch = self._schedule_decode()
        batch.transfers = self.block_manager.take_transfers() if batch else []
        return batch

    def _schedule_prefill(self) -> ScheduledBatch:
        batch = ScheduledBatch(Phase.PREFILL)
        budget = self.max_num_batched_tokens
        if self._begun is not None:
            budget -= self._take_prompt(batch, self._begun, budget)
        while budget and self.waiting and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            num_cached = self.block_manager.admit(seq)
            if num_cached is None:
                break
            self._start(self.waiting.popleft(), num_cached)
            budget -= self._take_prompt(batch, seq, budget)
        return batch

    def _start(self, seq: Sequence, num_cached: int) -> None:
        self.running.append(seq)
        seq.status = Status.RUNNING
        seq.num_computed_tokens = num_cached
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = num_cached

    def _take_prompt(self, batch: ScheduledBatch, seq: Sequence, budget: int) -> int:
        """Put the next tokens of a sequence into a batch, as many as are uncomputed and fit; returns how many."""
        start = seq.num_computed_tokens
        count = min(budget, seq.num_uncomputed_tokens)
        batch.seq_ids.append(seq.seq_id)
        batch.token_ids += seq.token_ids[start : start + count]
        batch.num_computed_tokens.append(start)
        batch.num_new_tokens.append(count)
        batch.block_tables.append(seq.block_table)
        # Published now and not after the step: sequences of the same step may share these blocks, because every backend
        # writes the K/V of the whole batch in a layer before any attention of that layer reads.
        self.block_manager.publish(seq, start + count, settled=False)
        self._in_flight.append(seq)
        if start + count < seq.num_tokens:
            self._begun = seq
        else:
            self._begun = None
            self._sample(batch, seq)
            self._fork(batch, seq)
        return count

    def _sample(self, batch: ScheduledBatch, seq: Sequence) -> None:
        """Sample a token for a sequence from the last row of the batch."""
        batch.sampled_rows.append(len(batch) - 1)
        batch.sampling.append(seq.sampling)
        self._sampled.append(seq)

    def _fork(self, batch: ScheduledBatch, parent: Sequence) -> None:
        """Start the completions that wait for this prompt: they share its blocks, and sample from the same row.

        Those that `max_num_seqs` leaves no room for start later, like any sequence, with what the prefix cache has.
        """
        while self.waiting and self.waiting[0].fork_of is parent and len(self.running) < self.max_num_seqs:
            if self.waiting[0].num_output_tokens or parent.num_output_tokens:  # preempted: they are no copies any more
                break
            child = self.waiting.popleft()
            self._start(child, parent.num_tokens)  # computed in this step
            self.block_manager.fork(parent, child)
            self._sample(batch, child)
            self.num_forks += 1

    def _schedule_decode(self) -> ScheduledBatch:
        running, held = self.running, self.held
        i = 0
        while i < len(running):  # oldest first; victims come off the other end
            seq = running[i]
            i += 1
            if len(seq.token_ids) > seq.num_slots and seq not in held:
                while not self.block_manager.allocate_slots(seq):
                    if self._preempt_newest() is seq:
                        break
        rows = [seq for seq in running if seq not in held] if held else running.copy()
        self._in_flight = self._sampled = rows
        return ScheduledBatch(
            Phase.DECODE,
            seq_ids=[seq.seq_id for seq in rows],
            token_ids=[seq.token_ids[-1] for seq in rows],
            num_computed_tokens=[seq.num_computed_tokens for seq in rows],
            num_new_tokens=[1] * len(rows),
            block_tables=[seq.block_table for seq in rows],
            sampled_rows=list(range(len(rows))),
            sampling=[seq.sampling for seq in rows],
        )

    def _preempt_newest(self) -> Sequence:
        """Take the blocks of the newest running sequence and put it at the front of the queue, to be resumed later."""
        seq = self.running.pop()
        if seq in self.held:  # it will sample its last token again, when it is resumed
            self.held.remove(seq)
            seq.token_ids.pop()
            seq.logprobs.pop()
        if self.preemption.prefers_swap(seq.num_computed_tokens):
            self.block_manager.swap_out(seq)
        else:
            self.block_manager.free(seq)
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        seq.status = Status.WAITING
        self.waiting.appendleft(seq)
        self.num_preemptions += 1
        return seq

    # ---- after the step

    def update(self, batch: ScheduledBatch, sampled: SampledBatch) -> list[Sequence]:
        """Take the results of a batch: count what is computed, append tokens, finish; returns who got a token."""
        in_flight, advanced = self._settle()
        self.block_manager.commit(sampled.unwritten)
        for seq, count in zip(in_flight, batch.num_new_tokens, strict=True):
            seq.num_computed_tokens += count
        token_ids, all_logprobs = sampled.token_ids, sampled.logprobs
        if self._aborted:
            kept = [i for i, seq in enumerate(advanced) if not seq.finished]
            advanced, token_ids = [advanced[i] for i in kept], [token_ids[i] for i in kept]
            all_logprobs = None if all_logprobs is None else [all_logprobs[i] for i in kept]
            self._aborted = False
        if all_logprobs is not None:
            for seq, logprobs in zip(advanced, all_logprobs, strict=True):
                if logprobs is not None:
                    seq.logprobs.append(logprobs)
        for seq, token in zip(advanced, token_ids, strict=True):
            tokens = seq.token_ids
            tokens.append(token)
            if token in seq.stop_token_ids or len(tokens) >= seq.next_check:
                self._finish_if_due(seq, token)
        return advanced

    def fail(self) -> list[Sequence]:
        """End the sequences of the batch in flight, because its step raised; what the batch published was never written."""
        in_flight, sampled = self._settle()
        self.block_manager.rollback()
        self._aborted = False
        failed = [seq for seq in dict.fromkeys([*in_flight, *sampled]) if not seq.finished]
        for seq in failed:
            self.finish(seq, "error")
        return failed

    def last_batch(self) -> ScheduledBatch:
        """Nothing to compute, only the copies that keep the cache beyond the end of this engine."""
        self.block_manager.tiers.write_all()
        return ScheduledBatch(Phase.DECODE, transfers=self.block_manager.take_transfers())

    def _settle(self) -> tuple[list[Sequence], list[Sequence]]:
        in_flight, self._in_flight = self._in_flight, []
        sampled, self._sampled = self._sampled, []
        return in_flight, sampled

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence, wherever it stands, and take its blocks back. Nothing happens if it has ended already."""
        if seq.finished:
            return
        self._aborted = bool(self._in_flight)
        (self.running if seq.status is Status.RUNNING else self.waiting).remove(seq)
        if seq is self._begun:
            self._begun = None
        self.held.discard(seq)
        self.block_manager.free(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason

    def _finish_if_due(self, seq: Sequence, token: int) -> None:
        if token in seq.stop_token_ids:  # before min_tokens they are banned, not sampled
            self.finish(seq, "stop", token if token in seq.params.stop_token_ids else None)
        elif seq.num_output_tokens == seq.params.max_tokens or seq.num_tokens >= self.max_model_len:
            self.finish(seq, "length")
        else:
            seq.plan_next_check(self.max_model_len)

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
            assert seq.num_computed_tokens <= seq.num_tokens <= self.max_model_len
            assert len(set(seq.block_table)) == len(seq.block_table)
            assert len(seq.block_table) >= self.block_manager.blocks_for(seq.num_computed_tokens)
            for block in seq.block_table:
                references[block] += 1
        for seq in self.waiting:
            assert seq.status is Status.WAITING
            assert not seq.block_table
            assert seq.num_computed_tokens == 0
        assert references == pool.ref_counts, "the references of the pool are those of the running sequences"
        assert len(self.running) <= self.max_num_seqs
        order = [seq.seq_id for seq in [*self.running, *self.waiting]]
        assert order == sorted(order), "running sequences are older than waiting ones, each list oldest first"
