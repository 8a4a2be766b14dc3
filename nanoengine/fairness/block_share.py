"""BlockShare: a client whose prompts wait is not kept waiting by the blocks and rows of another.

The part of each client is the blocks of the pool, and the rows, divided by the number of clients that have requests. Two rules
hold while there are several clients:

- A newcomer, a client of which nothing runs, starts its first sequence if that needs no more than its part: it passes a sequence
  that finds no room, and sequences of clients that have more than their part are preempted, the last in order first.
- When running sequences need more blocks than are free, such sequences give way first, and only then the last in order.

A sequence that needs more than the part of its client may have it while nobody else wants it.
"""

from __future__ import annotations

from collections import Counter
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
        was_tight = self._is_tight or self._starting is not None or is_full
        self._is_tight, self._starting = False, None
        part = self.blocks.num_blocks // len(self.clients)
        short = sum(map(self._growth, running)) - self.blocks.num_free
        victims = self._victims(running, part, short) if short > 0 else []
        if victims:
            self._starting = set()  # what they give back is not for them
        if was_tight and (newcomers := self._find_newcomers(running, waiting, part)):
            short += sum(newcomers.values())
            more = self._victims(running, part, short) if short > 0 else []
            if more or short <= 0:
                victims, self._starting = more, set(newcomers)
                if is_full and not victims:
                    victims = self._last_of_many_rows(running, len(newcomers))
        return victims

    def _last_of_many_rows(self, running: Seq[Sequence], count: int) -> list[Sequence]:
        """The last sequences of clients that have more than their part of the rows."""
        num_rows = Counter(seq.request.client for seq in running)
        victims: list[Sequence] = []
        for seq in reversed(running):
            client = seq.request.client
            if (
                num_rows[client] * len(self.clients) > self.num_rows
                and num_rows[client] > 1
                and seq.phase is not Phase.ENDING
            ):
                num_rows[client] -= 1
                victims.append(seq)
                if len(victims) == count:
                    break
        return victims

    def _find_newcomers(
        self, running: Iterable[Sequence], waiting: Iterable[Sequence], part: int
    ) -> dict[Sequence, int]:
        """The first waiting sequence of each client of which nothing runs, and the blocks that it needs, if it may have them."""
        found: dict[Sequence, int] = {}
        clients = self.clients.keys() - {seq.request.client for seq in running}
        for seq in waiting if clients else ():
            if seq.request.client in clients and seq.has_all_tokens:
                clients.remove(seq.request.client)
                if (need := self._need(seq)) <= part:
                    found[seq] = need
                if not clients:
                    break
        return found

    def _growth(self, seq: Sequence) -> int:
        """Blocks that its next token needs."""
        grows = seq.phase is Phase.DECODING and seq.num_slots <= seq.num_computed
        return len(self.blocks.layouts) if grows else 0

    def _need(self, seq: Sequence) -> int:
        """Blocks that it is admitted with, if it finds none of them in the cache."""
        size, count = self.blocks.block_size, seq.num_tokens + 1
        return sum(-(-min(layout.reserve(0, count), seq.max_num_tokens) // size) for layout in self.blocks.layouts)

    def _victims(self, running: Seq[Sequence], part: int, short: int) -> list[Sequence]:
        """The last sequences of clients that have more than their part, as many as free so many blocks; none if that is not
        enough.
        """
        held: dict[str, Counter[int]] = {client: Counter() for client in self.clients}
        growth = Counter[str]()
        for seq in running:
            held[seq.request.client].update(_blocks_of(seq))
            growth[seq.request.client] += self._growth(seq)
        victims: list[Sequence] = []
        gone = Counter[int]()
        for seq in reversed(running):
            client = seq.request.client
            own = held[client]
            if len(own) + growth[client] <= part or seq.phase is Phase.ENDING:
                continue
            victims.append(seq)
            growth[client] -= self._growth(seq)
            short -= self._growth(seq)
            for block in _blocks_of(seq):
                own[block] -= 1
                gone[block] += 1
                if not own[block]:
                    del own[block]
                short -= gone[block] == self.blocks.ref_counts[block]
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


def _blocks_of(seq: Sequence) -> Iterator[int]:
    return (block for table in seq.block_tables for block in table if block != NULL_BLOCK)
