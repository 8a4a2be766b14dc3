"""Snapshots: which states of which prefixes are kept, and where a sequence of a model with states begins.

K/V of a prefix are there for every token, a state only for its last. So a sequence can start behind a cached prefix where a
snapshot of the states was taken: at the end of a block, since hits end there. It is a copy in a pool of its own (`StatePool`), by
the hash of the block. What that has no room for goes where blocks go: to host memory and files.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.messages import Run, StepResult
from nanoengine.core.scheduler import Step
from nanoengine.core.seams import KVStore, PolicyPart
from nanoengine.core.sequence import Sequence
from nanoengine.features.kv_groups.messages import ORDERS, Restore, Snapshot, StateOrders

MOST_COMPARED = 32
"""Waiting sequences whose prompts are compared with each that is computed."""


@dataclass(slots=True, eq=False)
class Kept:
    """A snapshot in the pool."""

    slot: int
    hash: bytes
    tokens: bytes  # of the block that it stands behind


class Why(Enum):
    """Why a snapshot is taken."""

    PROMPT = auto()  # the end of a prompt, or where prompts part
    DECODE = auto()  # taken while a sequence decodes; replaced by the sequence's next one


class Taken(NamedTuple):
    """A snapshot that a step in flight takes."""

    seq: Sequence
    position: int
    why: Why
    slot: int


class Snapshots(KVStore, PolicyPart):
    """Takes snapshots of a prompt behind its last full block, and where prompts part: where its K/V are cached but no state is,
    and where others that wait have other tokens.

    A sequence that decodes keeps the snapshot of its last full block, so it can be resumed, and its text go on in the next turn.
    Snapshots are evicted in the order of their last use.

    Args:
        num_slots: snapshots that there is room for.
        first_slot: of the state pool that is for snapshots.
    """

    def __init__(self, blocks: BlockManager, num_slots: int, first_slot: int = 0):
        self.blocks, self.num_slots = blocks, num_slots
        self.free = list(range(first_slot, first_slot + num_slots))[::-1]
        self.index: OrderedDict[bytes, Kept] = OrderedDict()  # by hash of the prefix, least recently used first
        self.below, self.groups = KVStore(), range(0)
        self.num_taken = self.num_restored = self.num_loaded = self.num_evicted = 0  # since the start
        self._in_flight: deque[tuple[Step, list[Taken]]] = deque()
        self._waiting: list[Sequence] = []
        self._branches: dict[Sequence, int] = {}  # of a running prompt, tokens whose K/V were cached when it started
        self._drafted: dict[Sequence, int] = {}  # tokens before a run with drafts, whose next run is not planned yet
        self._last_of_decode: dict[Sequence, Kept] = {}  # the last snapshot of a sequence that decodes

    def keep_in(self, below: KVStore, num_pieces: int) -> None:
        """Evicted snapshots go to `below`, a store of blocks. There, each of the `num_pieces` pieces of a snapshot is a block of
        a group of its own, under the hash of the block that the snapshot stands behind.
        """
        first = len(self.blocks.layouts)
        self.below, self.groups = below, range(first, first + num_pieces)

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

    def _forget(self, hash: bytes) -> None:
        kept = self.index.pop(hash, None)
        if kept is not None:
            self.free.append(kept.slot)

    # ---- while a step is made

    def candidates(self, waiting: Iterable[Sequence]) -> Iterable[Sequence]:
        if isinstance(waiting, list):
            self._waiting = waiting
        return waiting

    def complete(self, step: Step) -> None:
        orders, taken, wanted = StateOrders(), list[Taken](), list[tuple[Sequence, int, Why]]()
        for seq in step.started:
            self._drafted.pop(seq, None)
            self._keep_last(seq)
            if (start := seq.num_written) and not self._restore(seq, start, orders) and seq in step.runs:
                wanted.append((seq, start, Why.PROMPT))
            self._branches[seq] = self._cached(seq)
        for seq, position, why in [*wanted, *self._wanted(step)]:
            if (slot := self._slot()) is not None:
                taken.append(Taken(seq, position, why, slot))
        taken.sort(key=lambda one: one.position)  # of each row as they are passed
        orders.snapshots += [Snapshot(seq.row, position, slot) for seq, position, _, slot in taken]
        if step.plan.num_drafted or (step.plan.runs and orders.snapshots):
            step.plan.needs_hidden = True  # not replayed: states are not simply kept behind the last token of each run
        if orders.restores or orders.snapshots:
            step.plan.extras[ORDERS] = orders
        self._in_flight.append((step, taken))

    def _restore(self, seq: Sequence, start: int, orders: StateOrders) -> bool:
        """Order the states of a sequence that starts behind `start` tokens: from its snapshot in the pool, or from below.

        The latter are loaded into the row itself, for which there is always room. Returns whether the pool has the snapshot.
        """
        hash, tokens = self._block(seq, start)
        self.num_restored += 1
        if is_kept := self._has(hash, tokens):
            kept = self.index[hash]
            self.index.move_to_end(hash)
            orders.restores.append(Restore(seq.row, kept.slot))
        else:
            for group, piece in self._pieces(seq.row):
                self.below.load(group, hash, tokens, piece)
            orders.restores.append(Restore(seq.row, seq.row))
            self.num_loaded += 1
        return is_kept

    def _wanted(self, step: Step) -> Iterator[tuple[Sequence, int, Why]]:
        """(sequence, position, reason) of each snapshot that the step should take."""
        size, plan = self.blocks.block_size, step.plan
        places = np.flatnonzero(plan.decode_starts % size == 0) if not self._drafted else range(len(step.decodes))
        for place in places:
            yield from self._after_decode(step.decodes[place], int(plan.decode_starts[place]))
        for seq, run in zip(step.runs, plan.runs, strict=True):
            if run.drafts:
                yield from self._after_decode(seq, run.start)
                self._drafted[seq] = run.start
            else:
                for position in self._of_chunk(seq, run):
                    if not self._is_known(seq, position):
                        yield seq, position, Why.PROMPT

    def _after_decode(self, seq: Sequence, start: int) -> Iterator[tuple[Sequence, int, Why]]:
        """The last end of a block that a decode at `start` has passed since its last step; drafts may have passed several."""
        before = self._drafted.pop(seq, start - 1)
        position = start // self.blocks.block_size * self.blocks.block_size
        if before < position:
            yield seq, position, Why.DECODE

    def _of_chunk(self, seq: Sequence, run: Run) -> Iterator[int]:
        """The positions in a chunk of a prompt behind which a snapshot is taken, ascending."""
        size, end = self.blocks.block_size, run.start + run.num_new
        count = len(seq.token_ids)
        last = (count - 1) // size * size
        whole = count // size * size if count + 1 == seq.max_num_tokens else last  # else its first decode takes that
        others = (self._common(seq, other) for other in self._waiting[:MOST_COMPARED])
        for position in sorted({last, whole, self._branches.get(seq, 0), *others}):
            if run.start < position <= end:
                yield position

    def _cached(self, seq: Sequence) -> int:
        """How many tokens of the sequence's prefix have their K/V in the cache, in whole blocks."""
        hashes, size = self.blocks.hit_hashes(seq), self.blocks.block_size
        count = seq.num_written // size
        groups = range(len(self.blocks.layouts))
        while count < len(hashes) and all(self.blocks.has(group, *hashes[count]) for group in groups):
            count += 1
        return count * size

    def _common(self, seq: Sequence, other: Sequence) -> int:
        """How many tokens two sequences have in common at their beginning, in whole blocks."""
        own, theirs = seq.block_hashes, self.blocks.hit_hashes(other)
        count = min(len(own), len(theirs))
        # Hashes are chained: behind the first that differs, all do.
        return bisect_left(range(count), True, key=lambda i: own[i][0] != theirs[i][0]) * self.blocks.block_size

    def _is_known(self, seq: Sequence, position: int) -> bool:
        return self._block(seq, position)[0] in self.index

    def _block(self, seq: Sequence, position: int) -> tuple[bytes, bytes]:
        return seq.block_hashes[position // self.blocks.block_size - 1]

    def _pieces(self, slot: int) -> Iterator[tuple[int, int]]:
        """(group, index in `StatePool.pieces`) of each piece of a slot."""
        return zip(self.groups, range(slot * len(self.groups), (slot + 1) * len(self.groups)), strict=True)

    def _slot(self) -> int | None:
        """A slot for another snapshot; the least recently used one is evicted if none is free. None: all are being written."""
        if not self.free and self.index:
            oldest = next(iter(self.index.values()))
            for group, piece in self._pieces(oldest.slot):
                self.below.evicted(group, oldest.hash, oldest.tokens, piece)
            self._forget(oldest.hash)
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
                if not (is_sound and is_hashed and seq.finish_reason != "error") or self._is_known(seq, position):
                    self.free.append(slot)
                    continue
                hash, tokens = self._block(seq, position)
                self._forget_last(seq)
                self._last_of_decode[seq] = self.index[hash] = Kept(slot, hash, tokens)
                self.num_taken += 1
                if why is Why.PROMPT or seq.finished:
                    self._keep_last(seq)
        if isinstance(result, BaseException):
            self._drafted.clear()

    def finished(self, seq: Sequence) -> None:
        self._branches.pop(seq, None)
        self._drafted.pop(seq, None)
        self._keep_last(seq)

    def _forget_last(self, seq: Sequence) -> None:
        """Forget the sequence's last snapshot from decoding: a later one replaces it."""
        before = self._last_of_decode.pop(seq, None)
        if before is not None and self.index.get(before.hash) is before:
            self._forget(before.hash)

    def _keep_last(self, seq: Sequence) -> None:
        """Keep the sequence's last snapshot: no later one replaces it. The store below is told, so it can save it at the end."""
        kept = self._last_of_decode.pop(seq, None)
        if kept is not None and self.index.get(kept.hash) is kept:
            self._tell(kept)

    def _tell(self, kept: Kept) -> None:
        for group, piece in self._pieces(kept.slot):
            self.below.cached(group, kept.hash, b"", kept.tokens, piece)
