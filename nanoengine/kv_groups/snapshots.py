"""Snapshots: which states of which prefixes are kept, and where a sequence of a model with states begins.

K/V of a prefix are there for every token, a state only for its last. So a sequence can start behind a cached prefix where a
snapshot of the states was taken: at the end of a block, since hits end there. It is a copy in a pool of its own (`StatePool`), by
the hash of the block. What that has no room for goes where blocks go: to host memory and files.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.messages import Run, StepResult
from nanoengine.core.scheduler import Step
from nanoengine.core.seams import KVStore, PolicyPart
from nanoengine.core.sequence import Sequence
from nanoengine.kv_groups.messages import ORDERS, Restore, Snapshot, StateOrders

MOST_COMPARED = 32
"""Waiting sequences whose prompts are compared with each that is computed."""


@dataclass(slots=True, eq=False)
class Kept:
    """A snapshot in the pool."""

    slot: int
    hash: bytes
    tokens: bytes  # of the block that it stands behind


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
    Snapshots are evicted in the order of their last use; those that only the interval is the reason of go first, until they are
    used, and are kept nowhere else.

    Args:
        num_slots: snapshots that there is room for.
        interval: tokens.
        first_slot: of the state pool that is for snapshots.
    """

    def __init__(self, blocks: BlockManager, num_slots: int, interval: int, first_slot: int = 0):
        self.blocks, self.num_slots = blocks, num_slots
        self.interval = max(interval // blocks.block_size, 1) * blocks.block_size
        self.free = list(range(first_slot, first_slot + num_slots))[::-1]
        self.index: OrderedDict[bytes, Kept] = OrderedDict()  # by hash of the prefix, least recently used first
        self._guesses: dict[bytes, None] = {}  # those of the index that nobody has used, the oldest first
        self.below, self.groups = KVStore(), range(0)
        self.num_taken = self.num_restored = self.num_loaded = self.num_evicted = 0
        self._in_flight: deque[tuple[Step, list[Taken], list[Kept]]] = deque()
        self._endings: list[tuple[Snapshot, Kept]] = []  # ordered by the next plan
        self._waiting: list[Sequence] = []
        self._branches: dict[Sequence, int] = {}  # of a running prompt, tokens whose K/V were cached when it started
        self._drafted: dict[Sequence, int] = {}  # tokens before a run with drafts, whose next run is not planned yet
        self._passing: dict[Sequence, Kept] = {}  # its last snapshot while it decodes

    def keep_in(self, below: KVStore, num_pieces: int) -> None:
        """What there is no room for goes to a store of blocks. There, each piece of a snapshot is a block of a group of its own,
        under the hash of the block that the snapshot stands behind.
        """
        first = len(self.blocks.layouts)
        self.below, self.groups = below, range(first, first + num_pieces)

    def snapshot(self) -> Mapping[str, int]:
        """Counts over the life of the engine."""
        return {
            "slots": self.num_slots,
            "kept": len(self.index),
            "taken": self.num_taken,
            "restored": self.num_restored,
            "loaded": self.num_loaded,
            "evicted": self.num_evicted,
        }

    # ---- as a store of blocks

    def has(self, group: int, hash: bytes, tokens: bytes) -> bool:
        return group in self.groups and self._has(hash, tokens)

    def may_end(self, hash: bytes, tokens: bytes, has: Callable[[int, bytes, bytes], bool]) -> bool:
        if self._has(hash, tokens):
            return True
        return bool(self.groups) and all(has(group, hash, tokens) for group in self.groups)

    def _has(self, hash: bytes, tokens: bytes) -> bool:
        kept = self.index.get(hash)
        return kept is not None and kept.tokens == tokens

    def invalidated(self, group: int, hash: bytes, tokens: bytes) -> None:
        self._forget(hash)
        if group == 0:
            for own in self.groups:
                self.below.invalidated(own, hash, tokens)

    def clear(self) -> None:
        for hash in list(self.index):
            self._forget(hash)
        self._endings.clear()

    def _forget(self, hash: bytes) -> None:
        kept = self.index.pop(hash, None)
        self._guesses.pop(hash, None)
        if kept is not None:
            self.free.append(kept.slot)

    # ---- while a step is made

    def candidates(self, waiting: Iterable[Sequence]) -> Iterable[Sequence]:
        if isinstance(waiting, list):
            self._waiting = waiting
        return waiting

    def complete(self, step: Step) -> None:
        orders, taken, wanted = StateOrders(), list[Taken](), list[tuple[Sequence, int, Why]]()
        orders.endings, endings = [order for order, _ in self._endings], [kept for _, kept in self._endings]
        self._endings.clear()
        for seq in step.started:
            self._drafted.pop(seq, None)
            self._stays(seq)
            if (start := seq.num_written) and not self._restore(seq, start, orders) and seq in step.runs:
                wanted.append((seq, start, Why.ASKED))
            self._branches[seq] = self._cached(seq)
        for seq, position, why in sorted([*wanted, *self._wanted(step)], key=lambda one: one[2] is Why.GUESS):
            slot = self._slot(why)
            if slot is not None:
                taken.append(Taken(seq, position, why, slot))
        taken.sort(key=lambda one: one.position)  # of each row as they are passed
        orders.snapshots += [Snapshot(seq.row, position, slot) for seq, position, _, slot in taken]
        if step.plan.num_drafted or (step.plan.runs and orders.snapshots):
            step.plan.needs_hidden = True  # not replayed: states are not simply kept behind the last token of each run
        if orders.endings or orders.restores or orders.snapshots:
            step.plan.extras[ORDERS] = orders
        self._in_flight.append((step, taken, endings))

    def _restore(self, seq: Sequence, start: int, orders: StateOrders) -> bool:
        """Whether the pool has its snapshot. Otherwise it is loaded into the row itself, for which there is always room."""
        hash, tokens = self._block(seq, start)
        self.num_restored += 1
        if is_kept := self._has(hash, tokens):
            kept = self.index[hash]
            self.index.move_to_end(hash)
            orders.restores.append(Restore(seq.row, kept.slot))
            if hash in self._guesses:
                del self._guesses[hash]
                self._tell(kept)
        else:
            for group, piece in self._pieces(seq.row):
                self.below.load(group, hash, tokens, piece)
            orders.restores.append(Restore(seq.row, seq.row))
            self.num_loaded += 1
        return is_kept

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
        count = len(seq.token_ids)
        last = (count - 1) // size * size
        whole = count // size * size if count + 1 == seq.max_num_tokens else last  # else its first decode takes that
        every = range(run.start // self.interval * self.interval, end + 1, self.interval)
        others = (self._common(seq, other) for other in self._waiting[:MOST_COMPARED])
        asked = {last, whole, self._branches.get(seq, 0), *others}
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
        return self._block(seq, position)[0] in self.index

    def _block(self, seq: Sequence, position: int) -> tuple[bytes, bytes]:
        return seq.block_hashes[position // self.blocks.block_size - 1]

    def _pieces(self, slot: int) -> Iterator[tuple[int, int]]:
        """Of a slot of the state pool: the group of each piece, and its place."""
        return zip(self.groups, range(slot * len(self.groups), (slot + 1) * len(self.groups)), strict=True)

    def _slot(self, why: Why) -> int | None:
        """For another snapshot; None: there is no room for this one."""
        less_wanted = self._guesses if self._guesses or why is Why.GUESS else self.index
        if not self.free and less_wanted:
            oldest = self.index[next(iter(less_wanted))]
            for group, piece in self._pieces(oldest.slot) if oldest.hash not in self._guesses else ():
                self.below.evicted(group, oldest.hash, oldest.tokens, piece)
            self._forget(oldest.hash)
            self.num_evicted += 1
        return self.free.pop() if self.free else None

    # ---- when its result is there

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        while self._in_flight and self._in_flight[0][0].number <= step.number:
            own, taken, endings = self._in_flight.popleft()
            is_sound = own is step and not step.is_dropped and not isinstance(result, BaseException)
            for kept in () if is_sound else endings:
                if self.index.get(kept.hash) is kept:
                    self.invalidated(0, kept.hash, kept.tokens)
            for seq, position, why, slot in taken:
                # A sequence that was preempted while its tokens were in flight has not hashed them yet.
                is_hashed = position <= len(seq.block_hashes) * self.blocks.block_size
                if not (is_sound and is_hashed and seq.finish_reason != "error") or self._is_known(seq, position):
                    self.free.append(slot)
                    continue
                hash, tokens = self._block(seq, position)
                kept = self.index[hash] = Kept(slot, hash, tokens)
                self.num_taken += 1
                self._make_way(seq)
                if why is Why.GUESS:
                    self._guesses[hash] = None
                    continue
                self._passing[seq] = kept
                if why is Why.ASKED or seq.finished:
                    self._stays(seq)
        if isinstance(result, BaseException):
            self._drafted.clear()

    def finished(self, seq: Sequence) -> None:
        self._branches.pop(seq, None)
        self._drafted.pop(seq, None)
        if seq.finish_reason in ("stop", "length"):
            self._keep_ending(seq)
        self._stays(seq)

    def _keep_ending(self, seq: Sequence) -> None:
        """If its last step has filled a block, its row has the states behind that until another has the row. The copy takes the
        slot of its snapshot before, a free one, or that of a guess.
        """
        position, size = len(seq.token_ids) - 1, self.blocks.block_size
        if position % size or position > len(seq.block_hashes) * size:  # the second: it was preempted
            return
        for step, _, _ in self._in_flight:  # it goes on there, and the snapshot is taken; or it was preempted
            if seq in step.decodes or seq in step.runs or seq.row in step.plan.ended:
                return
        if self._is_known(seq, position):
            return
        self._make_way(seq)
        if not self.free and self._guesses:
            self._forget(next(iter(self._guesses)))
        if self.free:
            hash, tokens = self._block(seq, position)
            kept = self._passing[seq] = self.index[hash] = Kept(self.free.pop(), hash, tokens)
            self._endings.append((Snapshot(seq.row, position, kept.slot), kept))
            self.num_taken += 1

    def _make_way(self, seq: Sequence) -> None:
        """A later snapshot takes the place of its last one."""
        before = self._passing.pop(seq, None)
        if before is not None and self.index.get(before.hash) is before:
            self._forget(before.hash)

    def _stays(self, seq: Sequence) -> None:
        """No later snapshot takes the place of its last one: who looks after the end of the engine hears of it."""
        kept = self._passing.pop(seq, None)
        if kept is not None and self.index.get(kept.hash) is kept:
            self._tell(kept)

    def _tell(self, kept: Kept) -> None:
        for group, piece in self._pieces(kept.slot):
            self.below.cached(group, kept.hash, b"", kept.tokens, piece)
