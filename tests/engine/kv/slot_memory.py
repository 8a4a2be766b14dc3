"""A simulated memory for the tests of this folder: what every slot of every block, host slot and file really holds."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from nanoengine.engine.kv.block_pool import Prefix
from nanoengine.engine.messages import Place, Tier, Transfer
from nanoengine.engine.sequence import Sequence

GARBAGE = b"garbage"


class SlotMemory:
    """A slot holds the salt and all tokens up to its own, so what it must hold follows from whose it is.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.blocks: dict[Place, dict[int, bytes]] = {}  # place -> offset -> content

    def after(self, transfers: Iterable[Transfer]) -> SlotMemory:
        """A copy in which these transfers have been made."""
        memory = SlotMemory(self.block_size)
        memory.blocks = {place: dict(content) for place, content in self.blocks.items()}
        memory.move(transfers)
        return memory

    def move(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            if transfer.source.tier is not Tier.DEVICE:
                assert transfer.source in self.blocks, "a copy that was never made is read"
            self.blocks[transfer.target] = dict(self.blocks.get(transfer.source, {}))

    def spoil(self, transfers: Iterable[Transfer]) -> None:
        """Transfers that broke half-way."""
        for transfer in transfers:
            self.blocks[transfer.target] = dict.fromkeys(range(self.block_size), GARBAGE)

    def write(self, seq: Sequence, start: int, tokens: list[int]) -> None:
        """Compute the tokens from `start` on, in the blocks of a sequence."""
        for position in range(start, len(tokens)):
            self._set(seq, position, _content(seq, tokens[: position + 1]))

    def write_garbage(self, seq: Sequence, start: int, end: int) -> None:
        for position in range(start, end):
            self._set(seq, position, GARBAGE)

    def _set(self, seq: Sequence, position: int, content: bytes) -> None:
        place = Place(Tier.DEVICE, seq.block_table[position // self.block_size])
        self.blocks.setdefault(place, {})[position % self.block_size] = content

    def check_sequence(self, seq: Sequence) -> None:
        """The table of a sequence reads back all its computed tokens."""
        for position in range(seq.num_computed_tokens):
            content = self.blocks[Place(Tier.DEVICE, seq.block_table[position // self.block_size])]
            assert content[position % self.block_size] == _content(seq, seq.token_ids[: position + 1])

    def check_prefix(self, prefix: Prefix, places: Iterable[Place]) -> None:
        """All copies of a prefix hold what it says."""
        chain = []
        ancestor: Prefix | None = prefix
        while ancestor is not None:
            chain.append(ancestor.token_bytes)
            ancestor = ancestor.parent
        whole = b"".join(reversed(chain))
        expected = {i: whole[: len(whole) - 4 * (self.block_size - 1 - i)] for i in range(self.block_size)}
        assert all(self.blocks[place] == expected for place in places)


def _content(seq: Sequence, tokens: list[int]) -> bytes:
    return seq.cache_salt + array("i", tokens).tobytes()
