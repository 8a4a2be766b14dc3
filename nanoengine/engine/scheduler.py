"""Scheduler: who runs in the next step, with how many tokens, and who gives its blocks back.

Prefill goes before decode, first come first served. A running sequence always arrived before every waiting one, so the
newest running sequence is the last in its list, and a preempted one belongs at the front of the queue.
"""

from __future__ import annotations

from collections import deque

from nanoengine.engine.block_manager import BlockManager
from nanoengine.engine.messages import Phase, SampledBatch, SamplingRow, ScheduledBatch
from nanoengine.engine.sequence import Sequence, Status
from nanoengine.outputs import FinishReason


class Scheduler:
    """Policy of the engine: `schedule` makes a batch, then `update` takes its results, or `fail` drops it.

    Args:
        block_manager: holds the KV pool; it can hold one sequence of `max_model_len` tokens at least.
        max_num_seqs: most running sequences.
        max_num_batched_tokens: most tokens in one step, which also bounds the running sequences.
        max_model_len: longest sequence in tokens; generation ends there.
    """

    def __init__(
        self, block_manager: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ):
        assert block_manager.blocks_for(max_model_len) <= block_manager.pool.num_blocks, "the pool holds one sequence"
        self.block_manager = block_manager
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._begun: Sequence | None = None  # the sequence of which the last prefill step computed only a chunk
        self._in_flight: dict[int, Sequence] = {}  # the sequences of the batch that was handed out
        self._published: list[int] = []  # the blocks whose content that batch computes

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. Its prompt is shorter than `max_model_len`: the engine has checked it."""
        assert 0 < seq.num_tokens < self.max_model_len
        self.waiting.append(seq)

    # ---- making a batch

    def schedule(self) -> ScheduledBatch:
        """The next step. Empty only if there is nothing to do."""
        assert not self._in_flight, "one batch at a time"
        batch = self._schedule_prefill()
        if not batch and self.running:
            batch = self._schedule_decode()
        return batch

    def _schedule_prefill(self) -> ScheduledBatch:
        batch = ScheduledBatch(Phase.PREFILL)
        budget = self.max_num_batched_tokens
        if self._begun is not None:
            budget -= self._take(batch, self._begun, budget)
        while budget and self.waiting and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            num_cached = self.block_manager.admit(seq)
            if num_cached is None:
                break
            self.waiting.popleft()
            self.running.append(seq)
            seq.status = Status.RUNNING
            seq.num_computed_tokens = num_cached
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = num_cached
            budget -= self._take(batch, seq, budget)
        return batch

    def _schedule_decode(self) -> ScheduledBatch:
        batch = ScheduledBatch(Phase.DECODE)
        i = 0
        while i < len(self.running):  # oldest first; victims come off the other end
            seq = self.running[i]
            while not self.block_manager.grow(seq):
                victim = self._preempt_newest()
                if victim is seq:
                    break
            else:
                self._take(batch, seq, 1)
                i += 1
        return batch

    def _take(self, batch: ScheduledBatch, seq: Sequence, budget: int) -> int:
        """Put the next tokens of a sequence into a batch, as many as are uncomputed and fit; returns how many."""
        start = seq.num_computed_tokens
        count = min(budget, seq.num_uncomputed_tokens)
        self._begun = None if start + count == seq.num_tokens else seq
        if self._begun is None:
            banned = tuple(seq.stop_token_ids) if seq.num_output_tokens < seq.params.min_tokens else ()
            batch.sampling.append(SamplingRow(len(batch), seq.params, seq.seed, banned))
        batch.seq_ids.append(seq.seq_id)
        batch.token_ids += seq.token_ids[start : start + count]
        batch.num_computed_tokens.append(start)
        batch.num_new_tokens.append(count)
        batch.block_tables.append(seq.block_table)
        # Published now and not after the step: sequences of the same step may share these blocks, because every backend
        # writes the K/V of the whole batch in a layer before any attention of that layer reads.
        self._published += self.block_manager.publish(seq, count)
        self._in_flight[seq.seq_id] = seq
        return count

    def _preempt_newest(self) -> Sequence:
        """Take the blocks of the newest running sequence and put it at the front of the queue, to be computed again."""
        seq = self.running.pop()
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
        in_flight, self._in_flight, self._published = self._in_flight, {}, []
        for seq_id, count in zip(batch.seq_ids, batch.num_new_tokens, strict=True):
            in_flight[seq_id].num_computed_tokens += count
        advanced = []
        for row, token, logprobs in zip(batch.sampling, sampled.token_ids, sampled.logprobs, strict=True):
            seq = in_flight[batch.seq_ids[row.row]]
            if seq.finished:  # aborted while the step ran
                continue
            seq.token_ids.append(token)
            if logprobs is not None:
                seq.logprobs.append(logprobs)
            self._finish_if_due(seq, token)
            advanced.append(seq)
        return advanced

    def fail(self, batch: ScheduledBatch) -> list[Sequence]:
        """End the sequences of a batch whose step raised; what the batch published was never written."""
        in_flight, self._in_flight = self._in_flight, {}
        published, self._published = self._published, []
        self.block_manager.withdraw(published)
        failed = [in_flight[seq_id] for seq_id in batch.seq_ids if not in_flight[seq_id].finished]
        for seq in failed:
            self.finish(seq, "error")
        return failed

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence, wherever it stands, and take its blocks back. Nothing happens if it has ended already."""
        if seq.finished:
            return
        (self.running if seq.status is Status.RUNNING else self.waiting).remove(seq)
        if seq is self._begun:
            self._begun = None
        self.block_manager.free(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason

    def _finish_if_due(self, seq: Sequence, token: int) -> None:
        if token in seq.stop_token_ids:  # before min_tokens they are banned, not sampled
            self.finish(seq, "stop", token if token in seq.params.stop_token_ids else None)
        elif seq.num_output_tokens == seq.params.max_tokens or seq.num_tokens >= self.max_model_len:
            self.finish(seq, "length")

    def check(self) -> None:
        """Raise AssertionError if an invariant of the scheduler or of the pool is broken."""
        pool = self.block_manager.pool
        pool.check()
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
