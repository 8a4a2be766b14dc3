"""DiskIndex: an index of the blocks that may be in files, and of the files that are in memory on their way to the pool.

Files are read, written and deleted by the runner's part, beside the steps, in the order of the orders. The index may be wrong:
other processes may have deleted or damaged a file. Its header and checksum are compared when it is read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

from nanoengine.features.kv_offload.host_tier import BlockKey
from nanoengine.features.kv_offload.messages import Copy, FileOutcome, FileRead, Location, OffloadOrders, Tier


class DiskIndex:
    """The index of files, one for each block, named after its hash and its KV group.

    Args:
        names: of the files that are there.
        fingerprint: of everything that K/V depends on except tokens.
        max_staged: most files that are being read, or were read and wait for free blocks of the pool.
    """

    def __init__(self, names: Iterable[str], fingerprint: str, max_staged: int):
        self.fingerprint, self.max_staged = fingerprint, max_staged
        self.files = set(names)
        self.writing: set[str] = set()  # without an outcome yet
        self.reading: dict[str, tuple[FileRead, bytes]] = {}  # without an outcome yet; with the tokens of the block
        self.staged: dict[str, bytes] = {}  # in memory: name -> tokens of the block
        self.wanted: Counter[str] = Counter()  # name -> number of sequences that wait for it

    @staticmethod
    def name(key: BlockKey) -> str:
        group, hash = key
        return f"{hash.hex()}-{group}"

    def header(self, key: BlockKey, tokens: bytes) -> bytes:
        """The header of the file of a block."""
        group, hash = key
        facts = {"fingerprint": self.fingerprint, "hash": hash.hex(), "tokens": tokens.hex(), "group": group}
        return json.dumps(facts, sort_keys=True).encode()

    # ---- writing

    def save(self, orders: OffloadOrders, key: BlockKey, tokens: bytes, source: Location) -> None:
        """Order a block to be written, unless it has a file, or is being written."""
        name = self.name(key)
        if name not in self.files and name not in self.writing:
            self.writing.add(name)
            orders.copies.append(Copy(source, Location(Tier.FILE, name), self.header(key, tokens)))

    def invalidate(self, orders: OffloadOrders, key: BlockKey) -> None:
        """The K/V may be wrong: a file is deleted, also one that is being written, or was written by a step that failed."""
        name = self.name(key)
        orders.deletes.append(name)
        self.files.discard(name)
        self.writing.discard(name)
        self.staged.pop(name, None)
        self.reading.pop(name, None)

    def clear(self, orders: OffloadOrders) -> None:
        orders.clears = True
        orders.copies = [copy for copy in orders.copies if copy.target.tier is not Tier.FILE]
        orders.deletes.clear()
        orders.reads.clear()
        for state in (self.files, self.writing, self.reading, self.staged):
            state.clear()

    # ---- reading

    def has(self, key: BlockKey, tokens: bytes) -> bool:
        """Whether the file of a block was read, so that the block can be copied into the pool."""
        return bool(self.staged) and self.staged.get(self.name(key)) == tokens

    @property
    def room(self) -> int:
        """The number of files that may be read beside the wanted ones."""
        return self.max_staged - len(self.wanted)

    def want(self, orders: OffloadOrders, key: BlockKey, tokens: bytes) -> str:
        """A sequence waits for a file: it is read, unless it is being read or was read. Returns its name."""
        name = self.name(key)
        self.wanted[name] += 1
        if name not in self.reading and name not in self.staged:
            order = FileRead(name, self.header(key, tokens))
            self.reading[name] = order, tokens
            orders.reads.append(order)
        return name

    def leave(self, orders: OffloadOrders, names: Iterable[str]) -> None:
        """A sequence waits for some files no longer: their memory is freed when no sequence waits for them."""
        for name in names:
            self.wanted[name] -= 1
            if not self.wanted[name]:
                del self.wanted[name]
                self.staged.pop(name, None)
                self.reading.pop(name, None)
                orders.wanted = list(self.wanted)

    # ---- results

    def answer(self, answer: FileOutcome) -> None:
        """Note the outcome of a read, a write or a deletion."""
        kind, name, problem = answer
        if kind == "gone" or (kind == "read" and problem is not None):
            self.files.discard(name)
        if kind == "written" and name in self.writing:
            self.writing.remove(name)
            if problem is None:
                self.files.add(name)
        if kind == "read" and name in self.reading:
            _, tokens = self.reading.pop(name)
            if problem is None:
                self.staged[name] = tokens

    def step_failed(self, failed: OffloadOrders, orders: OffloadOrders) -> None:
        """The orders of a failed step may have been carried out or not, and their outcomes may be lost: deletions and reads are
        ordered again, and writes count as not made.
        """
        self.writing.clear()
        orders.clears |= failed.clears
        orders.deletes += failed.deletes
        orders.reads = [order for order, _ in self.reading.values()]
        orders.wanted = list(self.wanted)
