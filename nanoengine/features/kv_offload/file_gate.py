"""FileGate: delays a prompt while blocks of its prefix are read from files; other prompts go on."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Phase, Sequence
from nanoengine.features.kv_offload.disk_index import DiskIndex
from nanoengine.features.kv_offload.host_tier import BlockKey
from nanoengine.features.kv_offload.offload import Offload

LOOKAHEAD = 8
"""Waiting sequences whose files are read before they can start."""


class Fetch:
    """The files of one sequence: all of them, and those whose reads have not ended."""

    def __init__(self, names: list[str]):
        self.names = names
        self.pending = names.copy()  # the last of these is being read


class FileGate(PolicyPart):
    """Delays prompts until their files are read. A failed read is a miss.

    Args:
        offload: its orders carry the reads.
    """

    def __init__(self, offload: Offload, disk: DiskIndex, blocks: BlockManager):
        self.offload, self.disk, self.blocks = offload, disk, blocks
        self.fetches: dict[Sequence, Fetch] = {}  # of waiting sequences
        self._too_little = 0  # a number of files that was too small for the next sequence that cannot start yet

    def preemption_victims(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> Iterable[Sequence]:
        """Order the files of sequences that cannot start yet; where memory is short, a later step tries again."""
        for seq in waiting[:LOOKAHEAD]:
            if self.disk.room <= self._too_little:
                break
            if seq not in self.fetches and seq.has_all_tokens and self._begin(seq, is_next=False) is None:
                self._too_little = self.disk.room
        return ()

    def allowed(self, seq: Sequence, budget: int) -> int:
        if seq.phase is not Phase.WAITING or not seq.has_all_tokens:
            return budget
        fetch = self.fetches.get(seq) or self._begin(seq, is_next=True)
        assert fetch is not None
        if not fetch.pending:
            return budget
        while fetch.pending and fetch.pending[-1] not in self.disk.reading:
            fetch.pending.pop()
        if fetch.pending:
            return 0
        # A shorter hit may need other files, such as those of its states.
        if any(name not in self.disk.staged for name in fetch.names):
            self._begin(seq, is_next=True)
            self.disk.leave(self.offload.orders, fetch.names)
        return self.allowed(seq, budget)

    def took(self, seq: Sequence, count: int) -> None:
        self.finished(seq)

    def _begin(self, seq: Sequence, *, is_next: bool) -> Fetch | None:
        """Order the files that continue the prefix hit of a sequence in memory.

        Args:
            is_next: order as many files as there is memory for; otherwise all of them, or none (and None is returned).
        """
        blocks, disk = self.blocks, self.disk
        hashes = blocks.hit_hashes(seq) if disk.files else []

        def has(group: int, hash: bytes, tokens: bytes) -> bool:
            return disk.name((group, hash)) in disk.files or blocks.has(group, hash, tokens)

        count = blocks.longest_hit(hashes, has)
        wanted = self._wanted(hashes[:count])
        while (excess := self._num_new(wanted) - disk.room) > 0:
            if not is_next:
                return None
            # A part of a window is of no use: there must be memory for all that a shorter hit needs.
            count = blocks.longest_hit(hashes[: max(0, count - -(-excess // len(blocks.layouts)))], has)
            wanted = self._wanted(hashes[:count])
        fetch = self.fetches[seq] = Fetch([disk.want(self.offload.orders, *block) for block in wanted])
        return fetch

    def _wanted(self, hashes: list[tuple[bytes, bytes]]) -> list[tuple[BlockKey, bytes]]:
        """The files that a hit of these blocks needs, including those that were read already."""
        blocks, wanted, end = self.blocks, [], len(hashes) * self.blocks.block_size
        firsts = [layout.first_visible(end) // blocks.block_size for layout in blocks.layouts]
        seen = [(group, hashes[first:]) for group, first in enumerate(firsts)]
        seen += [(group, hashes[-1:]) for group in self.offload.state_groups]
        for group, blocks_of_group in seen:
            for hash, tokens in blocks_of_group:
                key = group, hash
                if self.disk.has(key, tokens) or not blocks.has(group, hash, tokens):
                    wanted.append((key, tokens))
        return wanted

    def _num_new(self, wanted: list[tuple[BlockKey, bytes]]) -> int:
        return sum(self.disk.name(key) not in self.disk.wanted for key, _ in wanted)

    def finished(self, seq: Sequence) -> None:
        """The sequence has started, or has ended."""
        if (fetch := self.fetches.pop(seq, None)) is not None:
            self._too_little = 0
            self.disk.leave(self.offload.orders, fetch.names)
