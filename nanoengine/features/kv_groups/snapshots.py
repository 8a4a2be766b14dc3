"""Snapshots: the cache of recurrent states by prefixes, and the position where a sequence of a model with states starts.

The K/V of a prefix are cached for every token, a state only for its last. So a sequence can start behind a cached prefix that has
a snapshot of the states: at the end of a block, since hits end there. A snapshot is a copy in a separate pool (`StatePool`),
by the hash of the block. Evicted snapshots go to host memory and files, as blocks do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.messages import Run, StepResult
from nanoengine.core.scheduler import Step
from nanoengine.core.seams import KVStore, PolicyPart
from nanoengine.core.sequence import Sequence
from nanoengine.features.kv_groups.messages import STATE_ORDERS, RestoreSnapshot, StateOrders, TakeSnapshot

MOST_COMPARED = 32
"""Waiting sequences whose prompts are compared with each running prompt."""


@dataclass(slots=True, eq=False)
class StoredSnapshot:
    """A snapshot in the pool."""

    slot: int
    hash: bytes
    tokens: bytes  # of the last block of the prefix


class PendingSnapshot(NamedTuple):
    """A snapshot of a step in flight.

    Attributes:
        is_passing: a decode has completed a block; the sequence's next such snapshot replaces this one. The others are at the end
            of a prompt, or of the common prefix of prompts.
    """

    seq: Sequence
    position: int
    is_passing: bool
    slot: int


class Snapshots(KVStore, PolicyPart):
    """The policy of snapshots: a prompt has one behind its last full block, and one where prompts branch: at the end of its
    cached K/V without a state, and of its common prefix with a waiting prompt.

    A decoding sequence has a snapshot of its last full block, so that it can resume, and its text continue in the next turn.
    Snapshots are evicted in the order of their last use.

    Args:
        num_slots: capacity in snapshots.
        first_slot: the first slot of the state pool for snapshots.
    """

    def __init__(self, blocks: BlockManager, num_slots: int, first_slot: int = 0):
        self.blocks, self.num_slots = blocks, num_slots
        self.free = list(range(first_slot, first_slot + num_slots))[::-1]
        self.index: OrderedDict[bytes, StoredSnapshot] = OrderedDict()  # by hash, least recently used first
        self.below, self.groups = KVStore(), range(0)
        self.num_stored = self.num_restored = self.num_loaded = self.num_evicted = 0  # since the start
        self._in_flight: deque[tuple[Step, list[PendingSnapshot]]] = deque()
        self._waiting: list[Sequence] = []
        self._branches: dict[Sequence, int] = {}  # of a running prompt, tokens whose K/V were cached when it started
        self._drafted: dict[Sequence, int] = {}  # tokens before a run with drafts, whose next run is not planned yet
        self._last_of_decode: dict[Sequence, StoredSnapshot] = {}  # the last snapshot of a sequence that decodes

    def keep_in(self, below: KVStore, num_pieces: int) -> None:
        """Evicted snapshots go to `below`, a store of blocks. There, each of the `num_pieces` pieces of a snapshot is a block
        of a separate group, under the hash of the last block of the prefix.
        """
        first = len(self.blocks.layouts)
        self.below, self.groups = below, range(first, first + num_pieces)

    # ---- KVStore

    def has(self, group: int, hash: bytes, tokens: bytes) -> bool:
        return group in self.groups and self._has(hash, tokens)

    def may_end(self, hash: bytes, tokens: bytes, has: Callable[[int, bytes, bytes], bool]) -> bool:
        if self._has(hash, tokens):
            return True
        return bool(self.groups) and all(has(group, hash, tokens) for group in self.groups)

    def _has(self, hash: bytes, tokens: bytes) -> bool:
        snapshot = self.index.get(hash)
        return snapshot is not None and snapshot.tokens == tokens

    def invalidated(self, group: int, hash: bytes, tokens: bytes) -> None:
        self._forget(hash)
        if group == 0:
            for piece_group in self.groups:
                self.below.invalidated(piece_group, hash, tokens)

    def clear(self) -> None:
        for hash in list(self.index):
            self._forget(hash)

    def _forget(self, hash: bytes) -> None:
        snapshot = self.index.pop(hash, None)
        if snapshot is not None:
            self.free.append(snapshot.slot)

    # ---- while a step is made

    def candidates(self, waiting: Iterable[Sequence]) -> Iterable[Sequence]:
        if isinstance(waiting, list):
            self._waiting = waiting
        return waiting

    def complete(self, step: Step) -> None:
        orders, pending, wanted = StateOrders(), list[PendingSnapshot](), list[tuple[Sequence, int, bool]]()
        for seq in step.started:
            self._drafted.pop(seq, None)
            self._cache_last(seq)
            if (start := seq.num_written) and not self._restore(seq, start, orders) and seq in step.runs:
                wanted.append((seq, start, False))
            self._branches[seq] = self._cached(seq)
        for seq, position, is_passing in [*wanted, *self._wanted(step)]:
            if (slot := self._slot()) is not None:
                pending.append(PendingSnapshot(seq, position, is_passing, slot))
        pending.sort(key=lambda snapshot: snapshot.position)  # for each row in the order of its tokens
        orders.snapshots += [TakeSnapshot(seq.row, position, slot) for seq, position, _, slot in pending]
        if step.plan.num_drafted or (step.plan.runs and orders.snapshots):
            step.plan.needs_hidden = True  # not replayed: states are not only written behind the last token of each run
        if orders.restores or orders.snapshots:
            step.plan.extras[STATE_ORDERS] = orders
        self._in_flight.append((step, pending))

    def _restore(self, seq: Sequence, start: int, orders: StateOrders) -> bool:
        """Order the states of a sequence that starts behind `start` tokens: from its snapshot in the pool, or from the store
        below, which loads them into the slot of the row. Returns whether the pool has the snapshot.
        """
        hash, tokens = self._block(seq, start)
        self.num_restored += 1
        if is_stored := self._has(hash, tokens):
            self.index.move_to_end(hash)
            orders.restores.append(RestoreSnapshot(seq.row, self.index[hash].slot))
        else:
            for group, piece in self._pieces(seq.row):
                self.below.load(group, hash, tokens, piece)
            orders.restores.append(RestoreSnapshot(seq.row, seq.row))
            self.num_loaded += 1
        return is_stored

    def _wanted(self, step: Step) -> Iterator[tuple[Sequence, int, bool]]:
        """(sequence, position, `is_passing`) of each snapshot that the step should make."""
        size, plan = self.blocks.block_size, step.plan
        indices = np.flatnonzero(plan.decode_starts % size == 0) if not self._drafted else range(len(step.decodes))
        for index in indices:
            yield from self._after_decode(step.decodes[index], int(plan.decode_starts[index]))
        for seq, run in zip(step.runs, plan.runs, strict=True):
            if run.drafts:
                yield from self._after_decode(seq, run.start)
                self._drafted[seq] = run.start
            else:
                for position in self._of_chunk(seq, run):
                    if not self._is_known(seq, position):
                        yield seq, position, False

    def _after_decode(self, seq: Sequence, start: int) -> Iterator[tuple[Sequence, int, bool]]:
        """The last end of a block between the last step and a decode at `start`; drafts may have completed several blocks."""
        before = self._drafted.pop(seq, start - 1)
        position = start // self.blocks.block_size * self.blocks.block_size
        if before < position:
            yield seq, position, True

    def _of_chunk(self, seq: Sequence, run: Run) -> Iterator[int]:
        """The positions of snapshots in a chunk of a prompt, ascending."""
        size, end = self.blocks.block_size, run.start + run.num_new
        count = len(seq.token_ids)
        last = (count - 1) // size * size
        whole = count // size * size if count + 1 == seq.max_num_tokens else last  # else its first decode has it
        others = (self._common(seq, other) for other in self._waiting[:MOST_COMPARED])
        for position in sorted({last, whole, self._branches.get(seq, 0), *others}):
            if run.start < position <= end:
                yield position

    def _cached(self, seq: Sequence) -> int:
        """The number of tokens of the sequence's prefix whose K/V are cached, in whole blocks."""
        hashes, size = self.blocks.hit_hashes(seq), self.blocks.block_size
        count = seq.num_written // size
        groups = range(len(self.blocks.layouts))
        while count < len(hashes) and all(self.blocks.has(group, *hashes[count]) for group in groups):
            count += 1
        return count * size

    def _common(self, seq: Sequence, other: Sequence) -> int:
        """The length of the common prefix of two sequences in tokens, in whole blocks."""
        first, second = seq.block_hashes, self.blocks.hit_hashes(other)
        count = min(len(first), len(second))
        # Hashes are chained: behind the first that differs, all do.
        return bisect_left(range(count), True, key=lambda i: first[i][0] != second[i][0]) * self.blocks.block_size

    def _is_known(self, seq: Sequence, position: int) -> bool:
        return self._block(seq, position)[0] in self.index

    def _block(self, seq: Sequence, position: int) -> tuple[bytes, bytes]:
        return seq.block_hashes[position // self.blocks.block_size - 1]

    def _pieces(self, slot: int) -> Iterator[tuple[int, int]]:
        """(group, index in `StatePool.pieces`) of each piece of a slot."""
        return zip(self.groups, range(slot * len(self.groups), (slot + 1) * len(self.groups)), strict=True)

    def _slot(self) -> int | None:
        """A free slot; the least recently used snapshot is evicted if there is none. None: all slots are being written."""
        if not self.free and self.index:
            oldest = next(iter(self.index.values()))
            for group, piece in self._pieces(oldest.slot):
                self.below.evicted(group, oldest.hash, oldest.tokens, piece)
            self._forget(oldest.hash)
            self.num_evicted += 1
        return self.free.pop() if self.free else None

    # ---- when the result of a step is available

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        while self._in_flight and self._in_flight[0][0].number <= step.number:
            launched, pending = self._in_flight.popleft()
            is_sound = launched is step and not step.is_dropped and not isinstance(result, BaseException)
            for seq, position, is_passing, slot in pending:
                # A sequence that was preempted while its tokens were in flight has not hashed them yet.
                is_hashed = position <= len(seq.block_hashes) * self.blocks.block_size
                if not (is_sound and is_hashed and seq.finish_reason != "error") or self._is_known(seq, position):
                    self.free.append(slot)
                    continue
                hash, tokens = self._block(seq, position)
                self._forget_last(seq)
                self._last_of_decode[seq] = self.index[hash] = StoredSnapshot(slot, hash, tokens)
                self.num_stored += 1
                if not is_passing or seq.finished:
                    self._cache_last(seq)
        if isinstance(result, BaseException):
            self._drafted.clear()

    def finished(self, seq: Sequence) -> None:
        self._branches.pop(seq, None)
        self._drafted.pop(seq, None)
        self._cache_last(seq)

    def _forget_last(self, seq: Sequence) -> None:
        """Free the slot of the sequence's last snapshot from decoding: a later one replaces it."""
        before = self._last_of_decode.pop(seq, None)
        if before is not None and self.index.get(before.hash) is before:
            self._forget(before.hash)

    def _cache_last(self, seq: Sequence) -> None:
        """Cache the sequence's last snapshot: no later one replaces it, and the store below can save it when the engine ends."""
        snapshot = self._last_of_decode.pop(seq, None)
        if snapshot is not None and self.index.get(snapshot.hash) is snapshot:
            for group, piece in self._pieces(snapshot.slot):
                self.below.cached(group, snapshot.hash, b"", snapshot.tokens, piece)
