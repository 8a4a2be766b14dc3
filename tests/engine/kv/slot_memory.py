"""A simulated memory for the tests of this folder: what every slot of every block, host slot and file really holds."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from nanoengine.engine.kv.block_pool import NULL_BLOCK, PrefixKV
from nanoengine.engine.kv.groups import ENCODER, KVSpec
from nanoengine.engine.messages import Place, Tier, Transfer
from tests.engine.kv.toys import ToySequence

Slot = tuple[int, bytes]
"""Group and what was written there."""

GARBAGE: Slot = (-1, b"garbage")
"""What a plan that breaks leaves, and what is computed from that: it looks like any K/V."""

NAN: Slot = (-1, b"nan")
"""What spoils all that is computed from it, so that the sampler finds out."""

Content = dict[int, Slot]
"""Offset -> what a slot holds."""


class SlotMemory:
    """A slot holds its group, the salt and all tokens up to its own, so what it must hold follows from whose it is.

    Args:
        block_size: tokens per block.
        specs: of the groups.
    """

    def __init__(self, block_size: int, specs: tuple[KVSpec, ...]):
        self.block_size = block_size
        self.specs = specs
        self.blocks: dict[Place, Content] = {}

    def copy(self) -> SlotMemory:
        memory = SlotMemory(self.block_size, self.specs)
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

    def compute(
        self,
        salt: bytes,
        tables: list[list[int]],
        tokens: list[int],
        start: int,
        num_encoder_tokens: int,
        *,
        encodes: bool = False,
        fault: Slot | None = None,
    ) -> Slot | None:
        """Compute the tokens from `start` on, from what the tables hold of all that they see.

        Args:
            encodes: write what the encoder has made of its tokens first.
            fault: what to write, if it goes wrong anyway.

        Returns:
            what was written instead of what should have been; None: all is well.
        """
        for group, spec in enumerate(self.specs):
            if spec.kind != ENCODER:
                self._write(group, salt, tables[group], tokens, range(start, len(tokens)), None)
            elif encodes:
                told = None if fault == NAN else fault
                self._write(group, salt, tables[group], [0] * num_encoder_tokens, range(num_encoder_tokens), told)
        fault = fault or self.fault(salt, tables, tokens, start, num_encoder_tokens)
        if fault is not None:
            for group, spec in enumerate(self.specs):
                if spec.kind != ENCODER:
                    self._write(group, salt, tables[group], tokens, range(start, len(tokens)), fault)
        return fault

    def _write(
        self, group: int, salt: bytes, table: list[int], tokens: list[int], positions: range, fault: Slot | None
    ) -> None:
        for position in positions:
            place, offset = self._slot(table, position)
            assert place.where != NULL_BLOCK, "nobody writes to the null block"
            self.blocks.setdefault(place, {})[offset] = fault or _content(group, salt, tokens[: position + 1])

    def fault(
        self, salt: bytes, tables: list[list[int]], tokens: list[int], position: int, num_encoder_tokens: int
    ) -> Slot | None:
        """What somebody at `position` reads that is not of these tokens: NAN if all of that is; None: nothing."""
        wrong: set[Slot | None] = set()
        for group, (spec, table) in enumerate(zip(self.specs, tables, strict=True)):
            own = [0] * num_encoder_tokens if spec.kind == ENCODER else tokens
            for seen in range(spec.first_seen(position), len(own)):
                place, offset = self._slot(table, seen)
                found = self.blocks.get(place, {}).get(offset)
                if found != _content(group, salt, own[: seen + 1]):
                    wrong.add(found)
        if not wrong:
            return None
        return NAN if wrong == {NAN} else GARBAGE

    def _slot(self, table: list[int], position: int) -> tuple[Place, int]:
        return Place(Tier.DEVICE, table[position // self.block_size]), position % self.block_size

    def check_prefix(self, kv: PrefixKV, places: Iterable[Place]) -> None:
        """All copies of a prefix in a group hold what it says."""
        chain = []
        ancestor = kv.prefix
        while ancestor is not None:
            chain.append(ancestor.token_bytes)
            ancestor = ancestor.parent  # type: ignore[assignment]
        expected = self.full_block(kv.group, b"".join(reversed(chain)))
        assert all(self.blocks[place] == expected for place in places)

    def full_block(self, group: int, whole: bytes) -> Content:
        """What the last of some full blocks holds, given salt and tokens of all of them."""
        size = self.block_size
        return {offset: (group, whole[: len(whole) - 4 * (size - 1 - offset)]) for offset in range(size)}


def all_tokens(seq: ToySequence) -> list[int]:
    """Those that nobody has been told of too."""
    return seq.token_ids + seq.coming


def _content(group: int, salt: bytes, tokens: list[int]) -> Slot:
    return group, salt + array("i", tokens).tobytes()
