"""BlockShare: fair division of blocks and rows among clients.

The fair share of a client is the blocks of the pool, and the rows, divided by the number of clients with requests. Two rules hold
while there are several clients:

- A newcomer, a client without a running sequence, starts its first sequence if that needs no more than the fair share of blocks:
  it passes waiting sequences that do not fit, and sequences of clients above their share are preempted, the last in order first.
  Where no row is free, a client below its share of rows gets one in the same way, if blocks are free.
- When running sequences need more blocks than are free, sequences of clients above their share are preempted first, and only then
  the last in order.

A client may have more than its share while no other client waits for it.
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
    """Chooses sequences for preemption while several clients have requests. Its cost is linear in the running sequences; where
    blocks are short, also in their blocks and in the waiting sequences.

    Args:
        blocks: of the pool.
        num_rows: most sequences that run at once.
        clients: unfinished sequences of each client with requests.
    """

    def __init__(self, blocks: BlockManager, num_rows: int, clients: Mapping[str, int]):
        self.blocks, self.num_rows, self.clients = blocks, num_rows, clients
        self._is_tight = False  # a waiting sequence did not fit
        self._starting: set[Sequence] | None = None  # the only sequences that may start in this step; None: all may

    def preemption_victims(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
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
            self._starting = set()  # the freed blocks are not for waiting sequences
        if is_full and short <= 0:
            row_share = max(1, self.num_rows // len(self.clients))
            below = {client for client in self.clients if num_rows[client] < row_share}
            lacking = self._find_first(below, waiting, -short)
            victims = self._last_of(running, num_rows, row_share, len(lacking))
            self._starting = set(lacking) if victims else None
        is_short = (was_tight or is_full) and not self._starting
        if is_short and (newcomers := self._find_first(self.clients.keys() - num_rows.keys(), waiting, part)):
            short += sum(newcomers.values())
            more = self._victims(running, part, short) if short > 0 else []
            if more or short <= 0:
                victims, self._starting = more, set(newcomers)
        return victims

    def _find_first(self, clients: set[str], waiting: Iterable[Sequence], most: int) -> dict[Sequence, int]:
        """The first waiting sequence of each of these clients with the number of blocks that it needs, if that is at most
        `most`.
        """
        needs: dict[Sequence, int] = {}
        for seq in waiting if clients else ():
            if seq.request.client in clients and seq.has_all_tokens:
                clients.remove(seq.request.client)
                if (need := self._need(seq)) <= most:
                    needs[seq] = need
                if not clients:
                    break
        return needs

    def _last_of(self, running: Seq[Sequence], num_rows: Counter[str], most_rows: int, count: int) -> list[Sequence]:
        """The last `count` running sequences of clients with more than `most_rows` rows."""
        victims: list[Sequence] = []
        for seq in reversed(running):
            if len(victims) < count and num_rows[seq.request.client] > most_rows and seq.phase is not Phase.ENDING:
                num_rows[seq.request.client] -= 1
                victims.append(seq)
        return victims

    def _growth(self, seqs: Iterable[Sequence]) -> int:
        """The number of blocks that the next tokens of sequences need."""
        grow = [seq.num_slots <= seq.num_computed and seq.phase is Phase.DECODING for seq in seqs]
        return len(self.blocks.layouts) * sum(grow)

    def _need(self, seq: Sequence) -> int:
        """The number of blocks that admit a sequence without cached blocks."""
        size, count = self.blocks.block_size, seq.num_tokens + 1
        return sum(-(-layout.reserve(0, count) // size) for layout in self.blocks.layouts)

    def _victims(self, running: Seq[Sequence], part: int, short: int) -> list[Sequence]:
        """The last running sequences of clients with more than `part` blocks that free `short` blocks; none if that is not
        enough.
        """
        seqs = defaultdict[str, list[Sequence]](list)  # that are not preempted
        for seq in running:
            seqs[seq.request.client].append(seq)
        held = {client: self._growth(running_of) + len(_blocks_of(running_of)) for client, running_of in seqs.items()}
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
        """Only newcomers, where there are some. A sequence that does not fit is noted: the scheduler does not ask for another
        then.
        """
        for seq in waiting:
            if self._starting is None or seq in self._starting:
                self._is_tight = True
                yield seq
                self._is_tight = False

    def took(self, seq: Sequence, count: int) -> None:
        self._is_tight = False


def _blocks_of(seqs: Iterable[Sequence]) -> set[int]:
    """The blocks of sequences."""
    return set[int]().union(*[table for seq in seqs for table in seq.block_tables]) - {NULL_BLOCK}
