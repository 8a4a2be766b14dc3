"""BlockShare: a client whose prompts wait is not kept waiting by the blocks and rows of another.

The part of each client is the blocks of the pool, and the rows, divided by the number of clients that have requests. Two rules
hold while there are several clients:

- A newcomer, a client of which nothing runs, starts its first sequence if that needs no more than its part of the blocks: it
  passes a sequence that finds no room, and sequences of clients that have more than their part are preempted, the last in order
  first. Where there is no row, a client that has less than its part of them gets one in the same way, if there are blocks.
- When running sequences need more blocks than are free, such sequences give way first, and only then the last in order.

A sequence that needs more than the part of its client may have it while nobody else wants it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.messages import NULL_BLOCK
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Phase, Sequence


class BlockShare(PolicyPart):
    """Says who gives blocks back while several clients have requests. It costs a look at each running sequence; where blocks are
    short, also one at their blocks and at the waiting sequences.

    Args:
        blocks: of the pool.
        num_rows: most sequences that run at once.
        clients: those that have requests.
    """

    def __init__(self, blocks: BlockManager, num_rows: int, clients: Mapping[str, int]):
        self.blocks, self.num_rows, self.clients = blocks, num_rows, clients
        self._is_tight = False  # somebody found no room
        self._starting: set[Sequence] | None = None  # nobody else starts in this step; None: all may

    def make_way(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        is_full = len(running) == self.num_rows
        was_tight = self._is_tight or self._starting is not None
        self._is_tight, self._starting = False, None
        if not was_tight and not is_full and len(running) * len(self.blocks.layouts) <= self.blocks.num_free:
            return []
        short = self._growth(running) - self.blocks.num_free
        if not was_tight and not is_full and short <= 0:
            return []
        part = self.blocks.num_blocks // len(self.clients)
        num_rows = Counter([seq.request.client for seq in running])
        victims = self._victims(running, part, short) if short > 0 else []
        if victims:
            self._starting = set()  # what they give back is not for them
        if is_full and short <= 0:
            own_rows = max(1, self.num_rows // len(self.clients))
            lacking = self._find_first({own for own in self.clients if num_rows[own] < own_rows}, waiting, -short)
            victims = self._last_of(running, num_rows, own_rows, len(lacking))
            self._starting = set(lacking) if victims else None
        is_short = (was_tight or is_full) and not self._starting
        if is_short and (newcomers := self._find_first(self.clients.keys() - num_rows.keys(), waiting, part)):
            short += sum(newcomers.values())
            more = self._victims(running, part, short) if short > 0 else []
            if more or short <= 0:
                victims, self._starting = more, set(newcomers)
        return victims

    def _find_first(self, clients: set[str], waiting: Iterable[Sequence], most: int) -> dict[Sequence, int]:
        """The first waiting sequence of each of these clients, and the blocks that it needs, if it needs no more than `most`."""
        found: dict[Sequence, int] = {}
        for seq in waiting if clients else ():
            if seq.request.client in clients and seq.has_all_tokens:
                clients.remove(seq.request.client)
                if (need := self._need(seq)) <= most:
                    found[seq] = need
                if not clients:
                    break
        return found

    def _last_of(self, running: Seq[Sequence], num_rows: Counter[str], most_rows: int, count: int) -> list[Sequence]:
        """The last sequences, so many, of clients that have more than so many rows."""
        victims: list[Sequence] = []
        for seq in reversed(running):
            if len(victims) < count and num_rows[seq.request.client] > most_rows and seq.phase is not Phase.ENDING:
                num_rows[seq.request.client] -= 1
                victims.append(seq)
        return victims

    def _growth(self, seqs: Iterable[Sequence]) -> int:
        """Blocks that the next tokens of some sequences need."""
        grow = [seq.num_slots <= seq.num_computed and seq.phase is Phase.DECODING for seq in seqs]
        return len(self.blocks.layouts) * sum(grow)

    def _need(self, seq: Sequence) -> int:
        """Blocks that it is admitted with, if it finds none of them in the cache."""
        size, count = self.blocks.block_size, seq.num_tokens + 1
        return sum(-(-layout.reserve(0, count) // size) for layout in self.blocks.layouts)

    def _victims(self, running: Seq[Sequence], part: int, short: int) -> list[Sequence]:
        """The last sequences of clients that have more than their part, as many as free so many blocks; none if that is not
        enough.
        """
        seqs = defaultdict[str, list[Sequence]](list)  # that stay
        for seq in running:
            seqs[seq.request.client].append(seq)
        held = {client: self._growth(own) + len(_blocks_of(own)) for client, own in seqs.items()}
        victims: list[Sequence] = []
        gone = Counter[int]()
        for seq in reversed(running):
            client = seq.request.client
            if held[client] <= part or seq.phase is Phase.ENDING:
                continue
            victims.append(seq)
            seqs[client].remove(seq)
            held[client] = self._growth(seqs[client]) + len(_blocks_of(seqs[client]))
            gone.update(blocks := _blocks_of([seq]))
            short -= self._growth([seq]) + sum(gone[block] == self.blocks.ref_counts[block] for block in blocks)
            if short <= 0:
                return victims
        return []

    def candidates(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """Newcomers alone, where there are some; and notes who finds no room: the scheduler does not come back."""
        for seq in waiting:
            if self._starting is None or seq in self._starting:
                self._is_tight = True
                yield seq
                self._is_tight = False

    def took(self, seq: Sequence, count: int) -> None:
        self._is_tight = False


def _blocks_of(seqs: Iterable[Sequence]) -> set[int]:
    """The blocks that some sequences hold."""
    return set[int]().union(*[table for seq in seqs for table in seq.block_tables]) - {NULL_BLOCK}
