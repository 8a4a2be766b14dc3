"""KVFolder: a folder with the files of one model's blocks. Several processes may use it at once, and be killed at any moment."""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

from nanoengine.features.kv_offload.kv_file import UNFINISHED, BadKVFile, file_bytes, read_kv_file, write_kv_file
from nanoengine.sizes import format_bytes

SUFFIX = ".kv"
SEED = "hash_seed"
FILE_NAME = re.compile(r"[0-9a-f]{32}-[0-9]+\.kv")
LONGEST_WRITE = 600.0
"""Seconds after which the writer of an unfinished file counts as dead."""

RESCAN = 60.0
"""Seconds after which the folder is scanned again for files of other processes."""


class KVFolder:
    """Files of one block each, named after the hash of the block; the least recently used are deleted first.

    Its files, and a seed for hashes, are readable for their owner only: K/V reveals the prompt, and with the seed, prompts with
    equal hashes can be searched.

    Args:
        folder: of all models; made if it does not exist.
        fingerprint: of everything that K/V depends on except tokens.
        block_bytes: K/V of one block.
        max_bytes: limit of the sum of the sizes of this model's files. Where several processes write at once, each counts the
            files of the others within a minute.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(self, folder: Path, fingerprint: str, block_bytes: int, max_bytes: int):
        self.path, self.block_bytes, self.max_bytes = folder / fingerprint, block_bytes, max_bytes
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        facts = self.path.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
            raise NotADirectoryError(f"{self.path} is not a folder of this user; links are not followed")
        self._sizes: OrderedDict[str, int] = OrderedDict()  # of the files, least recently used first
        self._num_bytes = 0
        self._next_scan = 0.0
        self._scan()
        self._make_room(0)

    @property
    def names(self) -> list[str]:
        """The names of all files."""
        return list(self._sizes)

    def seed(self) -> int:
        """The seed of the hashes that name the files. The first process draws it."""
        path = self.path / SEED
        unfinished = self.path / f"{SEED}.{secrets.token_hex(4)}{UNFINISHED}"
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(8))
        try:
            with suppress(FileExistsError):
                os.link(unfinished, path)  # all of it or nothing, and never over another one
        finally:
            unfinished.unlink()
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            content = file.read(9)
        if len(content) != 8:
            raise OSError(f"{path} does not hold 8 bytes: delete the folder {self.path}")
        return int.from_bytes(content, "little")

    def read(self, name: str, header: bytes, payload: memoryview) -> None:
        """See `read_kv_file`. A bad file is deleted."""
        try:
            read_kv_file(self._path(name), header, payload)
        except BadKVFile:
            with suppress(OSError):
                self.delete(name)
            raise
        if name in self._sizes:
            self._sizes.move_to_end(name)

    def write(self, name: str, header: bytes, payload: memoryview) -> list[str]:
        """Write a file. Returns the names of the files that were deleted to free space.

        Raises:
            OSError: it cannot be written, or `max_bytes` is less than it.
        """
        size = file_bytes(header, len(payload))
        if size > self.max_bytes:
            raise OSError(f"it has {format_bytes(size)}, and kv_disk_bytes is {format_bytes(self.max_bytes)}")
        if time.monotonic() >= self._next_scan:
            self._scan()
        self._forget(name)
        gone = self._make_room(size)
        write_kv_file(self._path(name), header, payload)
        self._sizes[name] = size
        self._num_bytes += size
        return gone

    def delete(self, name: str) -> None:
        self._forget(name)
        self._path(name).unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all files of this model, including those of other processes."""
        self._scan()
        for name in list(self._sizes):
            self.delete(name)

    def _path(self, name: str) -> Path:
        return self.path / f"{name}{SUFFIX}"

    def _forget(self, name: str) -> None:
        self._num_bytes -= self._sizes.pop(name, 0)

    def _make_room(self, size: int) -> list[str]:
        gone = []
        while self._sizes and self._num_bytes + size > self.max_bytes:
            gone.append(next(iter(self._sizes)))
            self.delete(gone[-1])
        return gone

    def _scan(self) -> None:
        """Read the names and sizes of all files; other processes may be writing and deleting meanwhile."""
        files, now = [], time.time()
        with os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    facts = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(UNFINISHED) and now - facts.st_mtime > LONGEST_WRITE:
                        os.unlink(entry.path)  # its writer was killed
                    elif FILE_NAME.fullmatch(entry.name) and stat.S_ISREG(facts.st_mode):
                        files.append((facts.st_mtime_ns, entry.name.removesuffix(SUFFIX), facts.st_size))
        self._sizes = OrderedDict((name, size) for _, name, size in sorted(files))
        self._num_bytes = sum(self._sizes.values())
        self._next_scan = time.monotonic() + RESCAN
