"""Scheduler: sequences and new tokens of the next step, admission, and preemption when blocks run out."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.errors import NotFiniteLogits, NoTokenLeft
from nanoengine.core.messages import UNKNOWN, Run, Started, StepPlan, StepResult
from nanoengine.core.outputs import FinishReason
from nanoengine.core.seams import SCHEDULE_HOOKS, Faults, PolicyPart, call_part, iterate_part
from nanoengine.core.sequence import Phase, Sequence

MIXED = "mixed"


@dataclass(slots=True, eq=False)
class Step:
    """A step from its scheduling to its commit."""

    number: int
    plan: StepPlan
    decodes: list[Sequence] = field(default_factory=list)  # without drafts, as the columns of the plan
    runs: list[Sequence] = field(default_factory=list)  # the sequence of each of `plan.runs`
    started: list[Sequence] = field(default_factory=list)
    is_dropped: bool = False  # an earlier step has failed, so the results of this one do not count
    launched: Any = None  # result of the executor (`Launched`), or its exception
    faults: Faults = field(default_factory=list)  # of parts, while the step was made


class Scheduler:
    """`schedule` makes a step; `commit` or `fail` takes the result of the oldest. Any number may be in flight.

    Sequences have one order: priority, then age. A step has a budget of tokens. Under the policy "prefill_first", a step has only
    prompt chunks while any prompt can start or continue, and otherwise one token for every decoding sequence. Under "mixed", it
    has one token for every decoding sequence, and prompt chunks get the rest of the budget.

    Args:
        blocks: of the KV pool.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens of a step.
        max_chunk: most tokens of one prompt in a step.
        parts: of capabilities; they may come and go.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str = "prefill_first",
        max_chunk: int | None = None,
        parts: list[PolicyPart] | None = None,
    ):
        self.blocks, self.policy, self.parts = blocks, policy, [] if parts is None else parts
        self._set_active([])
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # each computes a token in a step
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_chunk = min(max_chunk or max_num_batched_tokens, max_num_batched_tokens)
        self.waiting: list[Sequence] = []  # both sorted by `Sequence.order`
        self.running: list[Sequence] = []
        self.in_flight: deque[Step] = deque()
        self.free_rows = list(range(self.max_num_seqs))[::-1]
        self.ended_rows: list[int] = []
        self._last: Step | None = None  # the step that was made last
        self.num_steps = self.epoch = self.num_preemptions = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, new or preempted."""
        seq.phase = Phase.WAITING
        insort(self.waiting, seq, key=_order)

    def _unqueue(self, seq: Sequence) -> None:
        del self.waiting[bisect_left(self.waiting, seq.order, key=_order)]

    # ---- making a step

    def _set_active(self, parts: list[PolicyPart]) -> None:
        """Set the parts of the current step, and for each hook the parts that override it."""
        self.active = parts
        self._hooks = {
            name: [p for p in parts if getattr(getattr(p, name), "__func__", 0) is not getattr(PolicyPart, name)]
            for name in SCHEDULE_HOOKS
        }

    def schedule(self) -> Step | None:
        """Make the next step; None if there is no work before the results of steps in flight."""
        self.num_steps += 1
        step = Step(self.num_steps, StepPlan(self.epoch))
        if (active := [part for part in self.parts if not part.is_idle]) != self.active:
            self._set_active(active)
        for part in self._hooks["preemption_victims"]:
            for seq in iterate_part(step.faults, part, "preemption_victims", (), self.running, self.waiting):
                self._preempt(seq)
        num_preemptions, decodes_first = self.num_preemptions, self.policy == MIXED
        if decodes_first:
            self._decode(step)
        if self.num_preemptions == num_preemptions:  # else there is no room for more
            self._prefill(step, self.max_num_batched_tokens - len(step.decodes))
        if not decodes_first and not step.runs:
            self._decode(step)
        if not (step.runs or step.decodes or step.started):
            if not self.in_flight and len(self.running) > 1:  # started prompts wait for each other's blocks
                self._preempt_last()
                return self.schedule()
            if not any(call_part(step.faults, part, "wants_step", False) for part in self._hooks["wants_step"]):
                return None
        if step.decodes:
            for part in self._hooks["draft"]:
                call_part(step.faults, part, "draft", None, self, step)
        self._make_columns(step)
        plan = step.plan
        plan.ended, self.ended_rows = self.ended_rows, []
        plan.zeroed, self.blocks.zeroed = self.blocks.zeroed, []
        for part in self._hooks["complete"]:
            call_part(step.faults, part, "complete", None, step)
        self.in_flight.append(step)
        return step

    def _decode(self, step: Step) -> None:
        """Add one token of every decoding sequence."""
        add, decoding = step.decodes.append, Phase.DECODING
        parts = self._hooks["postponed"]
        postponed = {seq for part in parts for seq in iterate_part(step.faults, part, "postponed", (), self)}
        for seq in self.running.copy():
            if seq.phase is not decoding or (postponed and seq in postponed):
                continue
            if seq.num_computed >= seq.num_slots and not self._make_room(step, seq):
                continue
            seq.num_computed += 1
            seq.num_tokens += 1
            add(seq)

    def _make_columns(self, step: Step) -> None:
        """Fill the columns of the decodes. In a steady state they are the columns of the last step, one token further."""
        plan, last = step.plan, self._last
        if not step.runs and last is not None and not last.runs and step.decodes == last.decodes:
            plan.decode_rows, plan.decode_starts = last.plan.decode_rows, last.plan.decode_starts + 1
        else:
            plan.decode_rows = np.array([seq.row for seq in step.decodes], np.int32)
            plan.decode_starts = np.array([seq.num_computed - 1 for seq in step.decodes], np.int32)
        self._last = step

    def _make_room(self, step: Step, seq: Sequence) -> bool:
        """Allocate a slot for the next token, by preemptions if needed. False: no token is left, or it was preempted itself."""
        if seq.num_tokens == seq.max_num_tokens:
            seq.phase = Phase.ENDING
            return False
        while not self.blocks.grow(seq, seq.num_tokens, step.plan.tables):
            if self._preempt_last() is seq:
                return False
        return True

    def _prefill(self, step: Step, budget: int) -> None:
        """Add chunks of prompts: started ones, then waiting ones, while budget, rows and blocks last."""
        prefilling, waiting = Phase.PREFILLING, Phase.WAITING
        for seq in [seq for seq in self.running if seq.phase is prefilling]:
            budget -= self._add_chunk(step, seq, budget)
        if not budget or len(self.running) == self.max_num_seqs:
            return
        candidates: Iterable[Sequence] = self.waiting
        for part in self._hooks["candidates"]:
            candidates = iterate_part(step.faults, part, "candidates", candidates, candidates)
        for seq in candidates:
            # A part may list one twice.
            if seq.phase is not waiting or seq.waits_for in self.blocks.pending or not self._allowed(step, seq, budget):
                continue
            if not seq.has_all_tokens:  # preempted with a token in flight: no other sequence overtakes it
                break
            if (num_cached_blocks := self.blocks.find(seq)) is None:
                continue
            if not self.blocks.admit(seq, num_cached_blocks, step.faults):
                break  # too few blocks: no other sequence overtakes it
            self._start(step, seq)
            budget -= self._add_chunk(step, seq, budget)
            if not budget or len(self.running) == self.max_num_seqs:
                break
        for seq in step.started:
            self._unqueue(seq)

    def _start(self, step: Step, seq: Sequence) -> None:
        insort(self.running, seq, key=_order)
        seq.phase, seq.row, seq.start_step = Phase.PREFILLING, self.free_rows.pop(), step.number
        self.blocks.begin(seq)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed
        step.started.append(seq)
        tables = [table.copy() for table in seq.block_tables]
        step.plan.started.append(Started(seq.row, seq.token_ids.copy(), tables, seq.sampling))

    def _allowed(self, step: Step, seq: Sequence, budget: int) -> int:
        for part in self._hooks["allowed"]:
            budget = min(budget, call_part(step.faults, part, "allowed", budget, seq, budget))
        return budget

    def _add_chunk(self, step: Step, seq: Sequence, budget: int) -> int:
        """Add the next tokens of a prompt to a step, as many as allowed; returns their number."""
        start = seq.num_computed
        count = min(self._allowed(step, seq, budget) if budget else 0, seq.num_tokens - start, self.max_chunk)
        if not count:
            return 0
        if not self.blocks.grow(seq, start + count, step.plan.tables):
            return 0
        seq.num_computed += count
        samples = seq.num_computed == seq.num_tokens
        if samples:
            seq.num_tokens += 1
            seq.phase = Phase.DECODING
        step.plan.runs.append(Run(seq.row, start, count, samples))
        step.runs.append(seq)
        for part in self._hooks["took"]:
            call_part(step.faults, part, "took", None, seq, count)
        return count

    def _preempt_last(self) -> Sequence:
        """Preempt the running sequence of the lowest priority; of equal ones, the youngest."""
        return self._preempt(self.running[-1])

    def _preempt(self, seq: Sequence) -> Sequence:
        """Preempt a running sequence: release its blocks, and queue it. It resumes from its tokens."""
        self._stop(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.add(seq)
        return seq

    def _stop(self, seq: Sequence) -> None:
        """Remove a sequence from `running`, and release its row and blocks."""
        self.running.remove(seq)
        self.free_rows.append(seq.row)
        self.ended_rows.append(seq.row)
        self.blocks.release(seq)

    # ---- after a step

    def commit(self, result: StepResult) -> list[Sequence]:
        """Apply the result of the oldest step; returns the sequences with new tokens, or with an end."""
        step = self.in_flight.popleft()
        advanced: list[Sequence] = []
        if step.is_dropped:
            return advanced
        size, tokens, finished = self.blocks.block_size, result.token_ids, Phase.FINISHED
        for seq, token in zip(step.decodes, tokens, strict=False):
            if seq.phase is finished:
                continue
            advanced.append(seq)
            known = seq.token_ids
            length = len(known)
            if not length % size and seq.block_tables and token >= 0:
                # This step has written the K/V of the token before, and filled a block.
                self.blocks.publish(seq, length)
            known.append(token)
            if length + 1 == seq.max_num_tokens or token < 0 or token in seq.stop_token_ids:
                self._end(seq, token)
        at, accepted = len(step.decodes), iter(result.num_accepted)
        for seq, run in zip(step.runs, step.plan.runs, strict=True):
            count = run.num_new if run.drafts else int(run.samples)
            sampled, at = tokens[at : at + count], at + count
            num_accepted = next(accepted) if run.drafts else 0
            if seq.phase is not Phase.FINISHED:
                self._commit_run(step, seq, run, sampled, num_accepted)
                if sampled:
                    advanced.append(seq)
        return advanced

    def _commit_run(self, step: Step, seq: Sequence, run: Run, sampled: list[int], num_accepted: int) -> None:
        """Apply the result of a chunk, or of a decode with drafts."""
        num_rejected = len(run.drafts) - num_accepted
        seq.num_tokens -= num_rejected
        is_current = seq.start_step <= step.number and bool(seq.block_tables)  # it was not preempted since
        if is_current and run.drafts:
            seq.num_computed -= num_rejected
            seq.phase = Phase.DECODING
            if UNKNOWN in sampled:  # the K/V of a rejected draft may be NaN, and stays in its slot
                self.blocks.mark_dirty(seq)
        num_written = run.start + (1 if run.drafts else run.num_new)
        if is_current and not sampled:
            self.blocks.publish(seq, num_written)
        for index, token in enumerate(sampled[: num_accepted + 1]):
            if is_current and token >= 0:
                # The K/V of an accepted draft equal those of the sampled token before it.
                self.blocks.publish(seq, num_written + index)
            seq.token_ids.append(token)
            if token < 0 or token in seq.stop_token_ids or len(seq.token_ids) == seq.max_num_tokens:
                self._end(seq, token)
                return

    def _end(self, seq: Sequence, token: int) -> None:
        """End a sequence at its last token, or at a sample without a token."""
        if token < 0:
            seq.token_ids.pop()
        if token == UNKNOWN:
            self.blocks.invalidate(seq)
            why = "no logit is finite: broken weights, or a dtype too narrow for them"
            self.finish(seq, "error", NotFiniteLogits(why))
        elif token < 0:
            why = "the request forbids every token that has a finite logit: allow more tokens"
            self.finish(seq, "error", NoTokenLeft(why))
        elif token in seq.stop_token_ids:
            seq.stop_reason = token if token in seq.params.stop_token_ids else None
            self.finish(seq, "stop")
        else:
            self.finish(seq, "length")

    def fail(self, error: Exception | None = None) -> list[Sequence]:
        """Drop the oldest step, which has failed: its sequences end. All others resume from their tokens, since no step in flight
        counts.

        Args:
            error: of the step. None: an interruption, which ends no sequence.
        """
        failed = self.in_flight.popleft()
        if failed.is_dropped:
            return []
        for step in (failed, *self.in_flight):
            step.is_dropped = step is not failed
            self.blocks.dirty.update(step.plan.zeroed)
        self.epoch += 1
        while self.running:
            self._preempt_last()
        for seq in self.waiting:
            seq.num_tokens = len(seq.token_ids)
        self.blocks.pending.clear()
        seqs = () if error is None else dict.fromkeys([*failed.decodes, *failed.runs])
        ended = [seq for seq in seqs if seq.phase is not Phase.FINISHED]
        for seq in ended:
            self.finish(seq, "error", error)
        return ended

    def finish(self, seq: Sequence, reason: FinishReason, error: Exception | None = None) -> None:
        """End a sequence in any phase. An ended one does not change, except for the error."""
        if error is not None:
            seq.error, seq.finish_reason = seq.error or error, reason
        if seq.phase is Phase.FINISHED:
            return
        if seq.phase is Phase.WAITING:
            self._unqueue(seq)
        else:
            self._stop(seq)
        seq.phase, seq.finish_reason = Phase.FINISHED, reason


_order = attrgetter("order")
