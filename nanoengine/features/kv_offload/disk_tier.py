"""DiskTier: which blocks may be in files, and which files are in memory on their way to the pool.

Files are read, written and deleted by the runner's part, beside the steps, in the order in which that was ordered. What is known
of a file here is a hope: others may have deleted or damaged it. Whoever reads it finds that out from its header and checksum.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

from nanoengine.features.kv_offload.host_tier import Key
from nanoengine.features.kv_offload.messages import Copy, FileAnswer, FileRead, Orders, Place, Tier


class DiskTier:
    """A file for each block, named after its hash and its KV group.

    Args:
        names: of the files that are there.
        fingerprint: of everything that K/V depends on but tokens.
        max_staged: most files that are being read, or were read and wait for room in the pool.
    """

    def __init__(self, names: Iterable[str], fingerprint: str, max_staged: int):
        self.fingerprint, self.max_staged = fingerprint, max_staged
        self.files = set(names)
        self.writing: set[str] = set()  # not answered yet
        self.reading: dict[str, tuple[FileRead, bytes]] = {}  # not answered yet; with the tokens of the block
        self.staged: dict[str, bytes] = {}  # in memory: name -> tokens of the block
        self.wanted: Counter[str] = Counter()  # being read or staged, and by how many sequences

    @staticmethod
    def name(key: Key) -> str:
        group, hash = key
        return f"{hash.hex()}-{group}"

    def header(self, key: Key, tokens: bytes) -> bytes:
        """What the file of a block says of itself."""
        group, hash = key
        facts = {"fingerprint": self.fingerprint, "hash": hash.hex(), "tokens": tokens.hex(), "group": group}
        return json.dumps(facts, sort_keys=True).encode()

    # ---- writing

    def save(self, orders: Orders, key: Key, tokens: bytes, source: Place) -> None:
        """Order a block to be written, unless there is a file of it, or soon will be."""
        name = self.name(key)
        if name not in self.files and name not in self.writing:
            self.writing.add(name)
            orders.copies.append(Copy(source, Place(Tier.FILE, name), self.header(key, tokens)))

    def invalidate(self, orders: Orders, key: Key) -> None:
        """The K/V may be wrong: a file is deleted, also one that is being written, or was written by a step that failed."""
        name = self.name(key)
        orders.deletes.append(name)
        self.files.discard(name)
        self.writing.discard(name)
        self.staged.pop(name, None)
        self.reading.pop(name, None)

    def clear(self, orders: Orders) -> None:
        orders.clears = True
        orders.copies = [copy for copy in orders.copies if copy.target.tier is not Tier.FILE]
        orders.deletes.clear()
        orders.reads.clear()
        for state in (self.files, self.writing, self.reading, self.staged):
            state.clear()

    # ---- reading

    def has(self, key: Key, tokens: bytes) -> bool:
        """Whether a block was read, and can be copied into the pool."""
        return bool(self.staged) and self.staged.get(self.name(key)) == tokens

    @property
    def room(self) -> int:
        """Files that may be read beside those that are wanted."""
        return self.max_staged - len(self.wanted)

    def want(self, orders: Orders, key: Key, tokens: bytes) -> str:
        """A sequence waits for a file: it is read, unless it is being read or was read. Returns its name."""
        name = self.name(key)
        self.wanted[name] += 1
        if name not in self.reading and name not in self.staged:
            order = FileRead(name, self.header(key, tokens))
            self.reading[name] = order, tokens
            orders.reads.append(order)
        return name

    def leave(self, orders: Orders, names: Iterable[str]) -> None:
        """A sequence waits for some files no longer: their memory is given back when nobody wants it."""
        for name in names:
            self.wanted[name] -= 1
            if not self.wanted[name]:
                del self.wanted[name]
                self.staged.pop(name, None)
                self.reading.pop(name, None)
                orders.kept = list(self.wanted)

    # ---- results

    def answer(self, answer: FileAnswer) -> None:
        """Something has become of a file."""
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

    def step_failed(self, failed: Orders, orders: Orders) -> None:
        """What a step ordered may have happened or not; its answers may be lost. Deletions and reads are ordered again. What was
        written is not counted on.
        """
        self.writing.clear()
        orders.clears |= failed.clears
        orders.deletes += failed.deletes
        orders.reads = [order for order, _ in self.reading.values()]
        orders.kept = list(self.wanted)
