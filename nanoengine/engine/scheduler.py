"""Scheduler: who runs in the next step, with how many tokens, and who gives its blocks back.

A step has a budget of tokens. Two policies say who comes first: `prefill_first` computes prompts alone while there are any that
can start; `mixed` gives every running sequence its token, and prompts what is left. Both go by one order, `Sequence.order`: by
priority, and first come first served among equals. The last of the running sequences is the first to give way, and whoever was
preempted comes back before those that are behind it in that order.

A plan may be made while others are still on their way: what they compute counts as computed, what they sample as there. A plan
depends on lengths only, and they are known. What is not is whether a sequence will turn out to have ended: then its token of a
later plan is dropped when it comes. Plans are executed in order, so blocks and rows may be given to others at once: whatever a
plan on its way still writes there, it writes before them.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from nanoengine.engine.beam_search import Choice
from nanoengine.engine.common_blocks import CommonBlocks
from nanoengine.engine.decode_set import DecodeSet
from nanoengine.engine.fair_share import FairShare
from nanoengine.engine.invariants import check_scheduler
from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.messages import UNKNOWN, Chunk, Entries, StepPlan, StepResult
from nanoengine.engine.outbox import Outbox
from nanoengine.engine.preemption import Preemption
from nanoengine.engine.sequence import NO_ROW, Sequence, Status
from nanoengine.engine.speculation.drafted_runs import DraftedRuns
from nanoengine.engine.speculation.speculation import Speculation
from nanoengine.engine.stop_tokens import StopTokens
from nanoengine.outputs import FinishReason

PREFILL_FIRST, MIXED = POLICIES = ("prefill_first", "mixed")


@dataclass(slots=True, eq=False)
class InFlight:
    """A plan that was handed out, and whose runs and samples are in it."""

    plan: StepPlan
    decoded: list[Sequence] = field(default_factory=list)
    drafted: list[Sequence] = field(default_factory=list)  # one per run with drafts
    computed: list[Sequence] = field(default_factory=list)  # one per chunk
    sampled: list[Sequence] = field(default_factory=list)  # by the chunks
    last: list[Sequence] = field(default_factory=list)  # those for whom it samples the last token that they may have
    is_disturbed: bool = False  # whether any sequence has left the running ones since it was made

    def samplers(self) -> list[Sequence]:
        """Those who get a token at least, if all goes well; in the order of the samples, as long as there are no drafts."""
        if not self.drafted and not self.sampled:  # most often: a copy of many would take its time
            return self.decoded
        return [*self.decoded, *self.drafted, *self.sampled]

    def everybody(self) -> list[Sequence]:
        return list(dict.fromkeys([*self.decoded, *self.drafted, *self.computed, *self.sampled]))


class Advanced(NamedTuple):
    """Who got which token; UNKNOWN for those that should have got one, and have ended with an error. Those that a sequence got
    at once stand side by side.
    """

    seqs: list[Sequence]
    token_ids: list[int]


class Scheduler:
    """Policy of the engine: `schedule` makes a plan, then `update` takes its results, or `fail` drops it.

    Args:
        block_manager: holds the KV pool; it can hold one sequence of `max_model_len` tokens at least.
        max_num_seqs: most running sequences.
        max_num_batched_tokens: most tokens in one step, which also bounds the running sequences.
        max_model_len: longest sequence in tokens; generation ends there.
        preemption: whether the blocks of a victim are worth copying to host memory.
        policy: one of POLICIES.
        long_prefill_token_threshold: most tokens of one prompt in one step; None: as many as the budget has.
        max_client_share: most of the prompt tokens of a step that are one client's, while others have sequences too.
        speculation: chooses drafts; None: every step brings a sequence one token.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        preemption: Preemption | None = None,
        policy: str = PREFILL_FIRST,
        long_prefill_token_threshold: int | None = None,
        max_client_share: float = 0.5,
        speculation: Speculation | None = None,
    ):
        groups, num_blocks = block_manager.groups, block_manager.pool.num_blocks
        assert groups.blocks_at_once(max_model_len) <= num_blocks, "the pool holds one sequence"
        max_chunk = min(long_prefill_token_threshold or max_num_batched_tokens, max_num_batched_tokens)
        assert max_chunk <= groups.most_new or not groups.forget
        assert policy in POLICIES
        self.block_manager = block_manager
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.policy = policy
        self.max_chunk = max_chunk
        self.shares = FairShare(max_client_share)
        self._forgets = groups.forget
        self.preemption = Preemption() if preemption is None else preemption
        self.num_preemptions = 0
        self.num_forks = 0
        self.num_checks = 0  # times that a sequence was looked at in a decode step
        # Those that wait, run or have begun are in their order. A sequence is in one of the first three.
        self.waiting: deque[Sequence] = deque()
        self.fetching: list[Sequence] = []  # until files were read
        self.running: list[Sequence] = []
        self.begun: list[Sequence] = []  # running, and computed in part
        self.decodes = DecodeSet()  # running, and computed but for the last token
        self.held: set[Sequence] = set()  # running, but not to be decoded before `refork`
        self.complete: set[Sequence] = set()  # running, but the last token is on its way
        self.outbox = Outbox()
        self._untold: dict[Sequence, list[Entries]] = {}  # changes of tables, until a plan that computes the sequence
        self.drafts: DraftedRuns | None = None  # those who have any are running, and in no other set
        if speculation is not None:
            self.drafts = DraftedRuns(speculation, self.decodes, block_manager, self.outbox, max_chunk)
        self.in_flight: deque[InFlight] = deque()  # the oldest first
        self.free_rows = list(range(self.max_num_seqs))[::-1]
        self._common_blocks = CommonBlocks(block_manager)
        self._refused: tuple[int, int, int] | None = None  # who found no room, and in what pool
        self._stop_tokens = StopTokens()  # of the running sequences
        self.newly_started: list[Sequence] = []  # whom the last plan has begun, for the first time

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self.fetching)

    @property
    def num_in_flight(self) -> int:
        """Plans whose results were not taken yet."""
        return len(self.in_flight)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. Its prompt is shorter than `max_model_len`: the engine has checked it."""
        assert 0 < seq.num_tokens < self.max_model_len
        seq.limit_length(self.max_model_len)
        self.shares.add(seq.client)
        self._queue(seq)

    def set_mask(self, seq: Sequence, mask: bytes | None) -> None:
        """From its next token on a sequence may be given only tokens whose bits are set, in little-endian words of 32 bits.

        None lifts it. Nothing happens if the sequence has ended.
        """
        if not seq.finished:
            self.outbox.set_mask(seq, mask)

    # ---- making a plan

    def schedule(self) -> StepPlan:
        """The next step. Empty if there is nothing to do before the results of those on their way."""
        step = self._plan_step()
        while not step.plan.computes and self._wait_for_each_other:
            self._preempt_last()
            step = self._plan_step()
        plan = step.plan
        plan.wait = bool(self.fetching) and not plan.computes and not self.in_flight
        if plan or self.block_manager.has_orders:
            self.outbox.send(plan, step.samplers())
            plan.transfers, plan.reads, plan.writes, plan.deletes = self.block_manager.take_orders()
            self.in_flight.append(step)
        return plan

    @property
    def _wait_for_each_other(self) -> bool:
        """Whether all that run are beams that wait for others of theirs, which stand in the queue behind one without room."""
        return bool(self.waiting and self.running) and len(self.held) == len(self.running) and not self.in_flight

    def _plan_step(self) -> InFlight:
        """Who computes what."""
        step = InFlight(StepPlan())
        num_preemptions = self.num_preemptions
        self.newly_started = []
        self._make_room_for_prompts()
        if self.policy == MIXED:
            self._take_decodes(step)
            budget = self.max_num_batched_tokens - step.plan.num_decode_tokens
            self._take_chunks(step, budget, admit=self.num_preemptions == num_preemptions)
        else:
            self._take_chunks(step, self.max_num_batched_tokens, admit=self.num_preemptions == num_preemptions)
            if not step.computed:
                self._take_decodes(step)
        return step

    def _take_chunks(self, step: InFlight, budget: int, *, admit: bool) -> None:
        """Prompts, and what else must be computed before a sequence decodes: those that were begun first, then waiting ones."""
        self.shares.begin_step(budget)
        for begun in self.begun.copy():
            if most := self.shares.left(begun.client, budget):
                budget -= self._take_chunk(step, begun, most)
        place = 0
        while admit and budget and len(self.running) < self.max_num_seqs:
            place = self._next_waiting(place)
            if place == len(self.waiting):
                break
            seq = self.waiting[place]
            if seq.num_known_tokens < seq.num_tokens:  # preempted while a token of it was on its way
                break
            pool = self.block_manager.pool
            state = seq.seq_id, pool.num_free, len(pool.index)
            if state == self._refused:  # nothing has changed since
                break
            if not seq.in_lockstep and self.block_manager.fetch(seq):
                del self.waiting[place]
                self.fetching.append(seq)
                seq.status = Status.FETCHING
                continue
            num_cached = self.block_manager.admit(seq)
            if num_cached is None:
                self._refused = state
                break
            del self.waiting[place]
            self._start(seq, num_cached)
            self.outbox.tell_start(step.plan, seq)
            budget -= self._take_chunk(step, seq, self.shares.left(seq.client, budget))

    def _next_waiting(self, place: int) -> int:
        """The place of the first that may start, of those from `place` on; behind them all, if none may.

        Completions whose prompt is on its way wait until they can fork from it, and those of a client that has had its share of
        the step wait for the next. Whoever is passed over for that may not start later in the step either.
        """
        parents = {*self.begun, *self.fetching}
        if not parents and not self.shares.is_shared:
            return place
        for seq in islice(self.waiting, place, None):
            if seq.fork_of not in parents and self.shares.left(seq.client, 1):
                break
            place += 1
        return place

    def _start(self, seq: Sequence, num_computed: int) -> None:
        insort(self.running, seq, key=_order)
        seq.row = self.free_rows.pop()
        seq.status = Status.RUNNING
        seq.num_computed_tokens = num_computed
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = num_computed
            self.newly_started.append(seq)
        self._stop_tokens.add(seq.stop_token_ids)

    def _take_chunk(self, step: InFlight, seq: Sequence, budget: int) -> int:
        """Put the next tokens of a sequence into a step, as many as are uncomputed and may be; returns how many."""
        start = seq.num_computed_tokens
        count = min(budget, seq.num_tokens - start, self.max_chunk)
        # Published now and not after the step: sequences of the same step may share these blocks, because every backend
        # writes the K/V of the whole batch in a layer before any attention of that layer reads.
        self.block_manager.publish(seq, start + count, committed=False)
        seq.num_computed_tokens = start + count
        self.shares.take(seq.client, count)
        step.computed.append(seq)
        step.plan.tables += self._untold.pop(seq, ())
        samples: list[int] = []
        if seq.num_uncomputed_tokens:
            if seq not in self.begun:
                insort(self.begun, seq, key=_order)
        else:
            if seq in self.begun:
                self.begun.remove(seq)
            for sampled in (seq, *self._fork(step, seq)):
                samples.append(sampled.row)
                self._sample(step, sampled)
        step.plan.chunks.append(Chunk(seq.row, start, count, tuple(samples)))
        return count

    def _sample(self, step: InFlight, seq: Sequence) -> None:
        """The last chunk of a sequence samples its next token; from then on it is decoded."""
        step.sampled.append(seq)
        seq.num_tokens += 1
        if self._forgets:
            seq.num_slots = 0  # before it is decoded, it gives back what only its prompt has seen
        if seq.num_tokens == seq.max_num_tokens:
            step.last.append(seq)
            self.complete.add(seq)
        else:
            self.decodes.add(seq)

    def _fork(self, step: InFlight, parent: Sequence) -> list[Sequence]:
        """Start the completions that wait for a prompt: they share its blocks, and sample from the same position.

        They stand behind it in the order, and others of a higher priority may have come before them: those need blocks, these
        none yet. Those that `max_num_seqs` leaves no room for start later, like any sequence, with what the prefix cache has.
        """
        children: list[Sequence] = []
        place = bisect(self.waiting, parent.order, key=_order)
        while place < len(self.waiting) and len(self.running) < self.max_num_seqs:
            child = self.waiting[place]
            if child.fork_of is not parent:
                break
            if max(child.num_tokens, parent.num_tokens) > parent.num_prompt_tokens:  # resumed: copies no more
                break
            del self.waiting[place]
            self._start(child, parent.num_tokens)  # computed in this step
            self.block_manager.fork(parent, child)
            self.outbox.tell_start(step.plan, child)
            children.append(child)
            self.num_forks += 1
        return children

    def _take_decodes(self, step: InFlight) -> None:
        """One token of every sequence that decodes; the last in order give way for it."""
        num_in_flight = len(self.in_flight)
        drafts = None if self._has_prompts else self.drafts
        if drafts is not None and num_in_flight:
            drafts.postpone(self.max_num_batched_tokens)
        places: list[int] = []
        positions: list[int] = []
        for place, seq in self.decodes.due():
            self.num_checks += 1
            position = seq.num_computed_tokens
            if not (seq.decoding and self._make_room(step, seq, position)):
                continue
            last = seq.max_num_tokens - 2
            if position >= last:
                step.last.append(seq)
            # With a step in flight, the tokens of a block that has just been filled are not all known: it can be published
            # when they are.
            is_late = num_in_flight and self.block_manager.has_unpublished(seq)
            places.append(place)
            positions.append(
                min(position + num_in_flight, seq.num_slots, last) if is_late else min(seq.num_slots, last)
            )
        if places:
            self.decodes.check_again(places, positions)
        self.outbox.tell_restarts(step.plan)
        if drafts is not None:
            drafts.take(step, self.max_num_batched_tokens - len(self.decodes))
        if len(self.decodes):
            step.plan.decodes = self.decodes.advance()
            step.decoded = self.decodes.seqs
        step.plan.num_common_blocks = self._common_blocks.count(step.plan, step.decoded, step.drafted)
        for seq in step.last:
            self.decodes.remove(seq)
            self.complete.add(seq)

    @property
    def _has_prompts(self) -> bool:
        """Whether prompts may take what decodes leave of a step: they are worth more than drafts."""
        can_start = self.waiting and len(self.running) < self.max_num_seqs
        return self.policy == MIXED and bool(self.begun or can_start)

    def _make_room(self, step: InFlight, seq: Sequence, position: int) -> bool:
        """See to it that the next token of a sequence has a slot; False if it had to give way itself."""
        if position < seq.num_slots:
            self.block_manager.publish(seq, seq.num_written_tokens)
            return True
        changes = self._grow(seq)
        if changes and not self.outbox.restarts(seq):  # its whole tables are told
            step.plan.tables += changes
        return changes is not None

    def _make_room_for_prompts(self) -> None:
        """What prompts that were begun see no more makes room for what is to come of them.

        Admission has given each as many blocks as it needs at a time. But where others share those, more are needed: so this
        comes before anything is put into the step, and the last in order may give way. What changes is told with the next
        chunk: a plan tells of nobody whom it does not compute.
        """
        if self._forgets:
            for seq in self.begun.copy():
                if seq.status is Status.RUNNING and (changes := self._grow(seq, num_lookahead=1)):
                    self._untold.setdefault(seq, []).extend(changes)

    def _grow(self, seq: Sequence, num_lookahead: int = 0) -> list[Entries] | None:
        """Slots for the tokens of a sequence, and what that changes in its tables; None if it had to give way itself."""
        while (changes := self.block_manager.allocate_slots(seq, num_lookahead)) is None:
            if self._preempt_last() is seq:
                return None
        return changes

    def _preempt_last(self) -> Sequence:
        """Take the blocks of the last running sequence and put it back into the queue, to be resumed later."""
        seq = self.running.pop()
        num_computed = seq.num_computed_tokens
        if seq in self.held:  # it will sample its last token again, when it is resumed
            seq.token_ids.pop()
            seq.num_tokens -= 1
            seq.logprobs.pop()
        self._stop_running(seq)
        if self.preemption.prefers_swap(num_computed, self.block_manager.num_blocks_of(seq)):
            self.block_manager.swap_out(seq)
        else:
            self.block_manager.free(seq)
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self._queue(seq)
        self.num_preemptions += 1
        return seq

    def _queue(self, seq: Sequence) -> None:
        """Put a sequence into the queue, at its place in the order."""
        seq.status = Status.WAITING
        self.waiting.insert(bisect(self.waiting, seq.order, key=_order), seq)

    def _stop_running(self, seq: Sequence, *, disturbs: bool = True) -> None:
        """It has left `running`: leave all that belongs to it, and give its row back.

        Args:
            disturbs: it may be in plans on their way.
        """
        if disturbs:
            for step in self.in_flight:
                step.is_disturbed = True
        self.decodes.remove(seq)
        if self.drafts is not None:
            self.drafts.remove(seq)
        if seq in self.begun:
            self.begun.remove(seq)
        self.held.discard(seq)
        self.complete.discard(seq)
        self._untold.pop(seq, None)
        self._stop_tokens.remove(seq.stop_token_ids)
        self.outbox.stop(seq)
        self.free_rows.append(seq.row)
        seq.row = NO_ROW

    # ---- after the step

    def update(self, plan: StepPlan, result: StepResult) -> Advanced:
        """Take the results of the oldest plan in flight: tokens are known, sequences end."""
        step = self.in_flight.popleft()
        assert step.plan is plan, "results are taken in the order of the plans"
        self.block_manager.commit(result.files)
        self._wake()
        if step.drafted:
            assert self.drafts is not None
            samplers, tokens, logprobs = self.drafts.settle(step, result)
        else:
            samplers, tokens, logprobs = step.samplers(), result.token_ids, result.logprobs
        for i, entries in logprobs.items():
            if not samplers[i].finished:
                samplers[i].logprobs.append(entries)
        for part in result.prompt_logprobs:
            owner = next(seq for seq, chunk in zip(step.computed, plan.chunks, strict=True) if chunk.row == part.row)
            if not owner.finished:
                owner.take_prompt_logprobs(part.start, part.entries)
        if step.is_disturbed or step.drafted or self._stop_tokens.may_be_in(tokens):
            advanced = self._take_one_by_one(samplers, tokens)
        else:
            for seq, token in zip(samplers, tokens, strict=True):
                seq.token_ids.append(token)
            for seq in step.last:  # they are in no later plan
                self._end(seq, "length", disturbs=False)
                self.block_manager.free(seq)
            advanced = Advanced(samplers, tokens)
        if self.drafts is not None:
            self.drafts.wake()
        return advanced

    def _take_one_by_one(self, samplers: list[Sequence], tokens: list[int]) -> Advanced:
        """`update`, where some sequences have ended or may end by their tokens."""
        advanced = Advanced([], [])
        for seq, token in zip(samplers, tokens, strict=True):
            if seq.finished:  # while the plan was on its way
                if token == UNKNOWN and seq.finish_reason != "error":  # what it leaves in the cache may be wrong
                    self.block_manager.condemn(seq)
                continue
            advanced.seqs.append(seq)
            advanced.token_ids.append(token)
            if token == UNKNOWN:
                self._end(seq, "error")
                self.block_manager.condemn(seq)
                continue
            seq.token_ids.append(token)
            if token in seq.stop_token_ids:  # before min_tokens they are not sampled
                self.finish(seq, "stop", token if token in seq.params.stop_token_ids else None)
            elif seq.num_known_tokens == seq.max_num_tokens:
                self.finish(seq, "length")
        return advanced

    def _wake(self) -> None:
        """Queue those again whose files were read, or cannot be."""
        if self.fetching:
            for seq in self.fetching.copy():
                if not self.block_manager.is_fetching(seq):
                    self.fetching.remove(seq)
                    self._queue(seq)

    def fail(self) -> list[Sequence]:
        """End the sequences of the oldest plan in flight, because its step raised, and those that share what it was to write."""
        step = self.in_flight.popleft()
        failed = [seq for seq in self.block_manager.rollback(step.everybody(), self.running) if not seq.finished]
        for seq in failed:
            self._end(seq, "error")
            self.block_manager.discard(seq, wipe=True)
        for seq in self.waiting:
            if seq.num_known_tokens < seq.num_tokens:
                self._forget_on_their_way(seq)
        self._wake()
        return failed

    def _forget_on_their_way(self, seq: Sequence) -> None:
        """A preempted sequence may have shared what was not written: it samples its tokens that are on their way again."""
        seq.num_tokens = seq.num_known_tokens
        gone = Sequence(seq.seq_id, seq.token_ids, seq.params)
        gone.status = Status.FINISHED
        for step in self.in_flight:
            step.decoded = [gone if other is seq else other for other in step.decoded]
            step.drafted = [gone if other is seq else other for other in step.drafted]
            step.sampled = [gone if other is seq else other for other in step.sampled]

    def last_plan(self) -> StepPlan:
        """Nothing to compute, only the copies that keep the cache beyond the end of this engine."""
        self.block_manager.save_all()
        transfers, reads, writes, deletes = self.block_manager.take_orders()
        return StepPlan(transfers=transfers, reads=reads, writes=writes, deletes=deletes)

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence, wherever it stands, and take its blocks back. Nothing happens if it has ended already."""
        if not seq.finished:
            self._end(seq, reason, stop_reason)
            self.block_manager.free(seq)

    def _end(
        self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None = None, *, disturbs: bool = True
    ) -> None:
        """`finish`, but for its blocks."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self._stop_running(seq, disturbs=disturbs)
        elif seq.status is Status.FETCHING:
            self.fetching.remove(seq)
            self.block_manager.cancel_fetch(seq)
        else:
            self.waiting.remove(seq)
        self.shares.remove(seq.client)
        self.outbox.forget(seq)
        seq.num_tokens = seq.num_known_tokens  # what is still on its way is not its own any more
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason

    # ---- beams

    def hold(self, seq: Sequence) -> None:
        """Let a sequence keep its blocks, but decode no more until `refork`."""
        assert seq.status is Status.RUNNING
        self.decodes.remove(seq)
        self.held.add(seq)

    def refork(self, seqs: list[Sequence], choices: list[Choice]) -> None:
        """Make each of some held sequences of equal length a fork of one of them, with a new last token, and let it go on."""
        assert all(seq in self.held for seq in seqs)
        prefixes = [seq.token_ids[:-1] for seq in seqs]
        self.block_manager.refork(seqs, [seqs[choice.parent] for choice in choices])
        for seq, choice in zip(seqs, choices, strict=True):
            seq.token_ids = [*prefixes[choice.parent], choice.token]
            seq.num_tokens = seq.num_known_tokens
            seq.logprobs = []
            self.held.remove(seq)
            self.decodes.add(seq)
            self.outbox.restart(seq)

    def check(self) -> None:
        """Raise AssertionError if an invariant of the scheduler or of the pool is broken."""
        check_scheduler(self)


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.order
