"""DiskTier: an index of files with one block of K/V each, where a later process finds them again.

It knows names, sizes and the order of use, and never looks into the folder after its start: files are read, written and deleted
by the executor, beside the steps. So an entry is only a hope. Others may have deleted or damaged the file, which whoever reads it
finds out: its checksum, the fingerprint of the model, its tokens and the hash of the prefix before it must be right.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path

from nanoengine.engine.kv.kv_file import file_bytes
from nanoengine.engine.kv.orders import PlanRecord
from nanoengine.engine.messages import FileWrite, Place

SUFFIX = ".kv"

NAME = re.compile(r"[0-9a-f]{32}-([0-9a-f]{32})?-[0-9]+")
"""Of a file: see `DiskTier.name`."""

MAX_UNWRITTEN = 256 << 20
"""Bytes of K/V that may wait in memory to be written. What comes while so much waits is not written."""


class DiskTier:
    """A folder of blocks, least recently used first. A file is named after the hashes of its block and of the one before
    it, and its KV group.

    Host memory must be in front of it: files are read into its slots.

    Args:
        folder: made if it does not exist. Other models may use the same one.
        fingerprint: of everything that K/V depends on but tokens: the weights, the dtype, the layout of a block.
        block_bytes: K/V of one block.
        max_bytes: how much the folder's files of this model may hold together.
    """

    def __init__(self, folder: Path, fingerprint: str, block_bytes: int, max_bytes: int):
        self.folder = folder / fingerprint
        self.folder.mkdir(parents=True, exist_ok=True)
        self.fingerprint = fingerprint
        self.block_bytes = block_bytes
        self.max_bytes = max_bytes
        self.files: OrderedDict[str, int] = OrderedDict()  # name -> size
        self.num_bytes = 0
        self.writing: set[str] = set()  # ordered to be written, and not heard of yet
        self.barred: set[str] = (
            set()
        )  # being read, or perhaps written: one answer for a name is waited for before it is used again
        self._most_unwritten = max(1, MAX_UNWRITTEN // block_bytes)
        self._prefix = f"{self.folder}/"
        self._scan()

    def _scan(self) -> None:
        """Find what earlier processes have left; other processes may be deleting files meanwhile."""
        for unfinished in self.folder.glob("*.tmp"):  # of a process that died
            unfinished.unlink(missing_ok=True)
        found = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            if not NAME.fullmatch(path.stem):  # it is none of ours
                continue
            try:
                facts = path.stat()
            except FileNotFoundError:
                continue
            found.append((facts.st_mtime_ns, path.stem, facts.st_size))
        for _, name, size in sorted(found):
            self.files[name] = size
            self.num_bytes += size
        while self.num_bytes > self.max_bytes:
            name, size = self.files.popitem(last=False)
            self.num_bytes -= size
            Path(self.path(name)).unlink(missing_ok=True)

    # ---- names

    @staticmethod
    def name(hash: bytes, parent_hash: bytes, group: int) -> str:
        return f"{hash.hex()}-{parent_hash.hex()}-{group}"

    def path(self, name: str) -> str:
        return f"{self._prefix}{name}{SUFFIX}"

    def name_at(self, path: str) -> str | None:
        """The name of one of its files; None for any other path."""
        if not (path.startswith(self._prefix) and path.endswith(SUFFIX)):
            return None
        return path[len(self._prefix) : -len(SUFFIX)]

    def header(self, hash: bytes, parent_hash: bytes, token_bytes: bytes, group: int) -> bytes:
        """What the file of a block says of itself."""
        facts = {
            "fingerprint": self.fingerprint,
            "hash": hash.hex(),
            "parent_hash": parent_hash.hex(),
            "tokens": token_bytes.hex(),
            "group": group,
        }
        return json.dumps(facts, sort_keys=True).encode()

    # ---- files

    def can_read(self, name: str) -> bool:
        """Whether a read may be ordered."""
        return name in self.files and name not in self.writing and name not in self.barred

    def use(self, name: str) -> None:
        """It was hit: it goes to the end of the line. Nothing happens if it is not there."""
        if name in self.files:
            self.files.move_to_end(name)

    def write(self, plan: PlanRecord, name: str, header: bytes, source: Place, *, at_once: bool = True) -> bool:
        """Order a file to be written; the oldest ones make room.

        Args:
            at_once: False if it may have to wait until others are written.

        Returns:
            False, and nothing changed, if it is there already, or if there is no room.
        """
        size = file_bytes(header, self.block_bytes)
        if name in self.files or name in self.writing or name in self.barred:
            return False
        if at_once and len(self.writing) >= self._most_unwritten:
            return False
        if not self._make_room(plan, size):
            return False
        self.files[name] = size
        self.num_bytes += size
        self.writing.add(name)
        plan.writes.append(FileWrite(self.path(name), header, source))
        return True

    def _make_room(self, plan: PlanRecord, size: int) -> bool:
        going: list[str] = []
        num_bytes = self.num_bytes + size
        for name in self.files:
            if num_bytes <= self.max_bytes:
                break
            if name not in self.writing:
                going.append(name)
                num_bytes -= self.files[name]
        if num_bytes > self.max_bytes:
            return False
        for name in going:
            self.drop(plan, name)
        return True

    def drop(self, plan: PlanRecord, name: str) -> None:
        """Forget a file and order it to be deleted. If it is being written, `answer_write` sees to it once more."""
        size = self.files.pop(name, None)
        if size is None:
            return
        self.num_bytes -= size
        path = self.path(name)
        num_writes = len(plan.writes)
        if name in self.writing:
            plan.writes[:] = [order for order in plan.writes if order.path != path]
        if len(plan.writes) < num_writes:  # nobody has been told of it
            self.writing.remove(name)
        else:
            plan.deletes.append(path)

    def drop_behind(self, plan: PlanRecord, hashes: Collection[bytes]) -> None:
        """Drop the files of some blocks and of all that follow from them."""
        children: dict[str, list[str]] = {}
        for name in self.files:
            hash, parent_hash, _ = name.split("-")
            children.setdefault(parent_hash, []).append(name)
            if bytes.fromhex(hash) in hashes:
                children.setdefault("roots", []).append(name)
        going = children.pop("roots", []) + [name for hash in hashes for name in children.get(hash.hex(), [])]
        while going:
            name = going.pop()
            self.drop(plan, name)
            going += children.pop(name.partition("-")[0], [])

    def answer_write(self, plan: PlanRecord, name: str, problem: str | None) -> None:
        """An order to write has come to its end."""
        self.writing.discard(name)
        self.barred.discard(name)
        if name in self.files:
            if problem is not None:
                self.num_bytes -= self.files.pop(name)
        elif problem is None:  # it was dropped in the meantime
            plan.deletes.append(self.path(name))

    def rollback(self, plan: PlanRecord, spoilt: PlanRecord) -> None:
        """A plan failed: whether its files will come is not known. If one does, it is deleted; until then it is barred."""
        for order in spoilt.writes:
            name = self.name_at(order.path)
            if name in self.writing:
                self.writing.remove(name)
                self.barred.add(name)
                self.num_bytes -= self.files.pop(name, 0)
        plan.deletes += [path for path in spoilt.deletes if self.name_at(path) not in self.files]

    def clear(self, plan: PlanRecord) -> None:
        """Drop all files of this model that the index knows."""
        for name in list(self.files):
            self.drop(plan, name)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert self.num_bytes == sum(self.files.values()) <= self.max_bytes
        assert not self.writing & self.barred
