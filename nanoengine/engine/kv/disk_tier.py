"""DiskTier: prefixes whose K/V is in files of a folder, where a later process finds them again.

A file is trusted only after all of it was read: its checksum, the fingerprint of the model that computed it, its tokens and
the hash of the prefix before it. Anything else is ignored with a warning, once.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from nanoengine.engine.kv.block_pool import Prefix
from nanoengine.engine.kv.kv_file import BadKVFile, encode_header, file_bytes, read_kv_file

logger = logging.getLogger("nanoengine")

SUFFIX = ".kv"


class DiskTier:
    """A folder of blocks, least recently used first.

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
        for unfinished in self.folder.glob("*.tmp"):  # of a process that died
            unfinished.unlink(missing_ok=True)
        files = sorted(self.folder.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime)
        self._sizes = {file.stem: file.stat().st_size for file in files}
        self.num_bytes = sum(self._sizes.values())
        # Name -> the prefix that it holds; None if an earlier process wrote it and nobody has asked for it yet.
        self.files: OrderedDict[str, Prefix | None] = OrderedDict.fromkeys(file.stem for file in files)
        self._reading: set[str] = set()  # by the batch in flight
        self._writing: set[str] = set()
        self.make_room(0)

    def path(self, hash: bytes) -> Path:
        return self.folder / f"{hash.hex()}{SUFFIX}"

    def find(self, hash: bytes, parent: Prefix | None, token_bytes: bytes) -> Prefix | None:
        """The prefix of a file that is nobody's yet, if that is sound and holds exactly these tokens behind this parent."""
        name = hash.hex()
        if name not in self.files or self.files[name] is not None:
            return None
        prefix = Prefix(hash, parent, token_bytes)
        try:
            header, payload = read_kv_file(self.path(hash))
            if header != self._header(prefix):
                raise BadKVFile("it holds other tokens, or those of another model")
            if len(payload) != self.block_bytes:
                raise BadKVFile(f"it holds {len(payload)} bytes of K/V, not {self.block_bytes}")
        except BadKVFile as problem:
            logger.warning("ignored: %s: %s", self.path(hash), problem)
            self._delete(name)
            return None
        prefix.on_disk = True
        self.files[name] = prefix
        return prefix

    def use(self, prefix: Prefix) -> str:
        """The file of a prefix, which the next batch reads."""
        name = prefix.hash.hex()
        self.files.move_to_end(name)
        self._reading.add(name)
        return str(self.path(prefix.hash))

    def add(self, prefix: Prefix) -> tuple[str, bytes] | None:
        """Where the next batch is to write the K/V of a prefix, and its header; None if there is no room.

        The caller has made room.
        """
        name = prefix.hash.hex()
        header = encode_header(self._header(prefix))
        size = file_bytes(header, self.block_bytes)
        if name in self.files or self.num_bytes + size > self.max_bytes:
            return None
        self.files[name] = prefix
        self._sizes[name] = size
        self.num_bytes += size
        prefix.on_disk = True
        self._writing.add(name)
        return str(self.path(prefix.hash)), header

    def size_of(self, prefix: Prefix) -> int:
        """Bytes that the file of a prefix takes."""
        return file_bytes(encode_header(self._header(prefix)), self.block_bytes)

    def make_room(self, size: int) -> list[Prefix]:
        """Delete the oldest files, but none that the batch needs, until there is room for so many bytes.

        Returns:
            the prefixes that they held.
        """
        lost: list[Prefix] = []
        while self.num_bytes + size > self.max_bytes:
            oldest = next(iter(self.files), None)
            if oldest is None or oldest in self._reading or oldest in self._writing:
                break
            lost += self._delete(oldest)
        return lost

    def disown(self, hash: bytes) -> list[Prefix]:
        """Make a file nobody's, to be looked into again; returns whose it was."""
        prefix = self.files.get(hash.hex())
        if prefix is None:
            return []
        self.files[hash.hex()] = None
        prefix.on_disk = False
        return [prefix]

    def commit(self, unwritten: Iterable[str] = ()) -> list[Prefix]:
        """The batch in flight has been executed, but for the files that could not be written; returns whose they were."""
        lost = [prefix for path in unwritten for prefix in self._delete(Path(path).stem)]
        self._reading.clear()
        self._writing.clear()
        return lost

    def rollback(self) -> list[Prefix]:
        """It failed: the files that it was to write are not there, and one that it was to read may be the reason."""
        lost = [prefix for name in self._writing for prefix in self._delete(name)]
        lost += [prefix for name in self._reading for prefix in self.disown(bytes.fromhex(name))]
        self._reading.clear()
        self._writing.clear()
        return lost

    def _delete(self, name: str) -> list[Prefix]:
        prefix = self.files.pop(name, None)
        self.num_bytes -= self._sizes.pop(name, 0)
        (self.folder / f"{name}{SUFFIX}").unlink(missing_ok=True)
        if prefix is None:
            return []
        prefix.on_disk = False
        return [prefix]

    def clear(self) -> None:
        """Delete the files of this model."""
        for name in list(self.files):
            self._delete(name)

    def _header(self, prefix: Prefix) -> dict[str, str]:
        return {
            "fingerprint": self.fingerprint,
            "hash": prefix.hash.hex(),
            "parent_hash": prefix.parent_hash.hex(),
            "tokens": prefix.token_bytes.hex(),
        }
