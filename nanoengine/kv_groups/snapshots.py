"""Snapshots: which states of which prefixes are kept, and where a sequence of a model with states begins.

K/V of a prefix are there for every token, a state only for its last. So a sequence can start behind a cached prefix where a
snapshot of the states was taken: at the end of a block, since hits end there. It is a copy in a pool of its own (`StatePool`), by
the hash of the block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.messages import Run, StepResult
from nanoengine.core.scheduler import Step
from nanoengine.core.seams import KVStore, PolicyPart
from nanoengine.core.sequence import Sequence

ORDERS = "states"
"""In `StepPlan.extras`."""

MOST_COMPARED = 32
"""Waiting sequences whose prompts are compared with each that is computed."""


class Snapshot(NamedTuple):
    """Copy the states of a row, as they are behind its first `position` tokens."""

    row: int
    position: int
    slot: int


class Restore(NamedTuple):
    """A row that starts takes its states from a snapshot; one without such an order starts from zeros."""

    row: int
    slot: int


@dataclass(slots=True)
class StateOrders:
    restores: list[Restore] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)


class Why(Enum):
    """What a snapshot is taken for."""

    ASKED = auto()  # somebody has asked for this prefix, or will for all that is known
    GUESS = auto()  # by the interval alone: the first to go, and never in the place of another kind
    PASSING = auto()  # of a sequence that decodes: its next one takes the place of it


class Taken(NamedTuple):
    """A snapshot that a step in flight takes."""

    seq: Sequence
    position: int
    why: Why
    slot: int


class Snapshots(KVStore, PolicyPart):
    """Takes snapshots of a prompt behind its last full block, every `interval` tokens, and where prompts part: where its K/V are
    cached but no state is, and where others that wait have other tokens.

    A sequence that decodes keeps the one of its last full block, so it can be resumed, and its text go on in the next turn.
    Snapshots are forgotten in the order of their last use; those that only the interval is the reason of go first, until they are
    used.

    Args:
        num_slots: snapshots that there is room for.
        interval: tokens.
    """

    def __init__(self, blocks: BlockManager, num_slots: int, interval: int):
        self.blocks, self.num_slots = blocks, num_slots
        self.interval = max(interval // blocks.block_size, 1) * blocks.block_size
        self.free = list(range(num_slots))[::-1]
        self.index: OrderedDict[bytes, int] = OrderedDict()  # hash of a prefix -> slot, least recently used first
        self._guesses: dict[bytes, None] = {}  # those of the index that nobody has used, the oldest first
        self.num_taken = self.num_restored = self.num_evicted = 0
        self._in_flight: deque[tuple[Step, list[Taken]]] = deque()
        self._waiting: list[Sequence] = []
        self._branches: dict[
            Sequence, int
        ] = {}  # where the K/V of a running prompt's prefix was cached, and a state was not
        self._drafted: dict[Sequence, int] = {}  # tokens before a run with drafts, whose next run is not planned yet
        self._passing: dict[Sequence, bytes] = {}  # hash of its last snapshot while it decodes

    def snapshot(self) -> Mapping[str, int]:
        """Counts over the life of the engine."""
        return {
            "slots": self.num_slots,
            "kept": len(self.index),
            "taken": self.num_taken,
            "restored": self.num_restored,
            "evicted": self.num_evicted,
        }

    # ---- as a store of blocks

    def may_end(self, hash: bytes) -> bool:
        return hash in self.index

    def invalidated(self, group: int, hash: bytes, tokens: bytes) -> None:
        self._forget(hash)

    def clear(self) -> None:
        for hash in list(self.index):
            self._forget(hash)

    def _forget(self, hash: bytes) -> None:
        slot = self.index.pop(hash, None)
        self._guesses.pop(hash, None)
        if slot is not None:
            self.free.append(slot)

    # ---- while a step is made

    def candidates(self, waiting: Iterable[Sequence]) -> Iterable[Sequence]:
        if isinstance(waiting, list):
            self._waiting = waiting
        return waiting

    def complete(self, step: Step) -> None:
        orders, taken = StateOrders(), list[Taken]()
        for seq in step.started:
            self._drafted.pop(seq, None)
            self._passing.pop(seq, None)
            if start := seq.num_written:
                hash = self._hash(seq, start)
                self.index.move_to_end(hash)
                self._guesses.pop(hash, None)
                orders.restores.append(Restore(seq.row, self.index[hash]))
                self.num_restored += 1
            self._branches[seq] = self._cached(seq)
        for seq, position, why in sorted(self._wanted(step), key=lambda one: one[2] is Why.GUESS):
            slot = self._slot(why)
            if slot is not None:
                taken.append(Taken(seq, position, why, slot))
        taken.sort(key=lambda one: one.position)  # of each row as they are passed
        orders.snapshots += [Snapshot(seq.row, position, slot) for seq, position, _, slot in taken]
        if step.plan.num_drafted or (step.plan.runs and orders.snapshots):
            step.plan.needs_hidden = True  # not replayed: states are not simply kept behind the last token of each run
        if orders.restores or orders.snapshots:
            step.plan.extras[ORDERS] = orders
        self._in_flight.append((step, taken))

    def _wanted(self, step: Step) -> Iterator[tuple[Sequence, int, Why]]:
        """Whose states behind how many tokens."""
        size, plan = self.blocks.block_size, step.plan
        places = np.flatnonzero(plan.decode_starts % size == 0) if not self._drafted else range(len(step.decodes))
        for place in places:
            yield from self._passed(step.decodes[place], int(plan.decode_starts[place]))
        for seq, run in zip(step.runs, plan.runs, strict=True):
            if run.drafts:
                yield from self._passed(seq, run.start)
                self._drafted[seq] = run.start
            else:
                for position, why in self._of_chunk(seq, run):
                    if not self._is_known(seq, position):
                        yield seq, position, why

    def _passed(self, seq: Sequence, start: int) -> Iterator[tuple[Sequence, int, Why]]:
        """The end of a block that a decode has reached, perhaps by accepted drafts."""
        before = self._drafted.pop(seq, start - 1)
        position = start // self.blocks.block_size * self.blocks.block_size
        if before < position:
            yield seq, position, Why.PASSING

    def _of_chunk(self, seq: Sequence, run: Run) -> Iterator[tuple[int, Why]]:
        """Ascending."""
        size, end = self.blocks.block_size, run.start + run.num_new
        last = (len(seq.token_ids) - 1) // size * size
        every = range(run.start // self.interval * self.interval, end + 1, self.interval)
        others = (self._common(seq, other) for other in self._waiting[:MOST_COMPARED])
        asked = {last, self._branches.get(seq, 0), *others}
        for position in sorted(asked.union(every)):
            if run.start < position <= end:
                yield position, Why.ASKED if position in asked else Why.GUESS

    def _cached(self, seq: Sequence) -> int:
        """Tokens of a prefix whose K/V are cached."""
        hashes, size = self.blocks.hit_hashes(seq), self.blocks.block_size
        count = seq.num_written // size
        groups = range(len(self.blocks.layouts))
        while count < len(hashes) and all(self.blocks.has(group, *hashes[count]) for group in groups):
            count += 1
        return count * size

    def _common(self, seq: Sequence, other: Sequence) -> int:
        """Tokens of the blocks that two sequences begin with."""
        own, theirs = seq.block_hashes, self.blocks.hit_hashes(other)
        count = min(len(own), len(theirs))
        # Hashes are chained: behind the first that differs, all do.
        return bisect_left(range(count), True, key=lambda i: own[i][0] != theirs[i][0]) * self.blocks.block_size

    def _is_known(self, seq: Sequence, position: int) -> bool:
        return self._hash(seq, position) in self.index

    def _hash(self, seq: Sequence, position: int) -> bytes:
        return seq.block_hashes[position // self.blocks.block_size - 1][0]

    def _slot(self, why: Why) -> int | None:
        """For another snapshot; None: there is no room for this one."""
        less_wanted = self._guesses if self._guesses or why is Why.GUESS else self.index
        if not self.free and less_wanted:
            self._forget(next(iter(less_wanted)))
            self.num_evicted += 1
        return self.free.pop() if self.free else None

    # ---- when its result is there

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        while self._in_flight and self._in_flight[0][0].number <= step.number:
            own, taken = self._in_flight.popleft()
            is_sound = own is step and not step.is_dropped and not isinstance(result, BaseException)
            for seq, position, why, slot in taken:
                # A sequence that was preempted while its tokens were in flight has not hashed them yet.
                is_hashed = position <= len(seq.block_hashes) * self.blocks.block_size
                hash = self._hash(seq, position) if is_sound and is_hashed and seq.finish_reason != "error" else None
                if hash is None or hash in self.index:
                    self.free.append(slot)
                    continue
                self.index[hash] = slot
                if why is Why.GUESS:
                    self._guesses[hash] = None
                self.num_taken += 1
                if (before := self._passing.pop(seq, None)) is not None:
                    self._forget(before)
                if why is Why.PASSING and not seq.finished:
                    self._passing[seq] = hash
        if isinstance(result, BaseException):
            self._drafted.clear()

    def finished(self, seq: Sequence) -> None:
        for table in (self._branches, self._drafted, self._passing):
            table.pop(seq, None)
