"""A simulated memory for the tests of this folder: what every slot of every block, host slot and file really holds."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from nanoengine.engine.kv.block_pool import Prefix
from nanoengine.engine.messages import Place, Tier, Transfer
from tests.engine.kv.toys import ToySequence

GARBAGE = b"garbage"
Content = dict[int, bytes]
"""Offset -> what a slot holds."""


class SlotMemory:
    """A slot holds the salt and all tokens up to its own, so what it must hold follows from whose it is.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.blocks: dict[Place, Content] = {}

    def copy(self) -> SlotMemory:
        memory = SlotMemory(self.block_size)
        memory.blocks = {place: dict(content) for place, content in self.blocks.items()}
        return memory

    def move(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            if transfer.source.tier is not Tier.DEVICE:
                assert transfer.source in self.blocks, "a copy that was never made is read"
            self.blocks[transfer.target] = dict(self.blocks.get(transfer.source, {}))

    def spoil(self, places: Iterable[Place]) -> None:
        """Whatever was to be written there broke half-way."""
        for place in places:
            self.blocks[place] = dict.fromkeys(range(self.block_size), GARBAGE)

    def compute(self, salt: bytes, table: list[int], tokens: list[int], start: int, *, poisoned: bool = False) -> bool:
        """Compute the tokens from `start` on: from what the table holds of those before them, so garbage makes garbage.

        Returns:
            whether all is well.
        """
        is_sound = not poisoned and self.holds(salt, table, tokens[:start])
        for position in range(start, len(tokens)):
            content = _content(salt, tokens[: position + 1]) if is_sound else GARBAGE
            place, offset = self._slot(table, position)
            self.blocks.setdefault(place, {})[offset] = content
        return is_sound

    def holds(self, salt: bytes, table: list[int], tokens: list[int]) -> bool:
        """Whether a table reads back these tokens."""
        for position in range(len(tokens)):
            place, offset = self._slot(table, position)
            if self.blocks.get(place, {}).get(offset) != _content(salt, tokens[: position + 1]):
                return False
        return True

    def _slot(self, table: list[int], position: int) -> tuple[Place, int]:
        return Place(Tier.DEVICE, table[position // self.block_size]), position % self.block_size

    def check_prefix(self, prefix: Prefix, places: Iterable[Place]) -> None:
        """All copies of a prefix hold what it says."""
        chain = []
        ancestor: Prefix | None = prefix
        while ancestor is not None:
            chain.append(ancestor.token_bytes)
            ancestor = ancestor.parent
        expected = self.full_block(b"".join(reversed(chain)))
        assert all(self.blocks[place] == expected for place in places)

    def full_block(self, whole: bytes) -> Content:
        """What the last of some full blocks holds, given salt and tokens of all of them."""
        size = self.block_size
        return {offset: whole[: len(whole) - 4 * (size - 1 - offset)] for offset in range(size)}


def all_tokens(seq: ToySequence) -> list[int]:
    """Those that nobody has been told of too."""
    return seq.token_ids + seq.coming


def _content(salt: bytes, tokens: list[int]) -> bytes:
    return salt + array("i", tokens).tobytes()
