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


class FileGate(PolicyPart):
    """Delays prompts until their files are read. A failed read is a miss.

    Args:
        offload: its orders carry the reads.
    """

    def __init__(self, offload: Offload, disk: DiskIndex, blocks: BlockManager):
        self.offload, self.disk, self.blocks = offload, disk, blocks
        self.fetches: dict[Sequence, list[str]] = {}  # waiting sequence -> names of its files
        self._too_little = 0  # a number of files that was too small for the next sequence that cannot start yet

    def preemption_victims(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> Iterable[Sequence]:
        """Order the files of sequences that cannot start yet; where memory is short, a later step tries again."""
        for seq in waiting[:LOOKAHEAD]:
            if self.disk.room <= self._too_little:
                break
            if seq not in self.fetches and seq.has_all_tokens:
                self._begin(seq, is_next=False)
                if seq not in self.fetches:
                    self._too_little = self.disk.room
        return ()

    def allowed(self, seq: Sequence, budget: int) -> int:
        if seq.phase is not Phase.WAITING or not seq.has_all_tokens:
            return budget
        names = self.fetches.get(seq)
        if names is None:
            names = self._begin(seq, is_next=True)
        if self._is_reading(names):
            return 0
        # A shorter hit may need other files, such as those of its states.
        if any(name not in self.disk.staged for name in names):
            self._begin(seq, is_next=True)
            self.disk.leave(self.offload.orders, names)
            return self.allowed(seq, budget)
        return budget

    def fetching(self) -> list[Sequence]:
        """Sequences that wait for files."""
        return [seq for seq, names in self.fetches.items() if self._is_reading(names)]

    def _is_reading(self, names: list[str]) -> bool:
        """Whether a file is being read; most often it is the last."""
        return any(name in self.disk.reading for name in reversed(names))

    def took(self, seq: Sequence, count: int) -> None:
        self.finished(seq)

    def _begin(self, seq: Sequence, *, is_next: bool) -> list[str]:
        """Order the files that continue the prefix hit of a sequence in memory.

        Args:
            is_next: order as many files as there is memory for; otherwise all of them, or none.
        """
        blocks, disk = self.blocks, self.disk
        hashes = blocks.hit_hashes(seq) if disk.files else []

        def has(group: int, hash: bytes, tokens: bytes) -> bool:
            return disk.name((group, hash)) in disk.files or blocks.has(group, hash, tokens)

        count = blocks.longest_hit(hashes, has)
        wanted = self._wanted(hashes[:count])
        while (excess := self._num_new(wanted) - disk.room) > 0:
            if not is_next:
                return []
            # A part of a window is of no use: there must be memory for all that a shorter hit needs.
            count = blocks.longest_hit(hashes[: max(0, count - -(-excess // len(blocks.layouts)))], has)
            wanted = self._wanted(hashes[:count])
        names = self.fetches[seq] = [disk.want(self.offload.orders, *block) for block in wanted]
        return names

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
        if (names := self.fetches.pop(seq, None)) is not None:
            self._too_little = 0
            self.disk.leave(self.offload.orders, names)
