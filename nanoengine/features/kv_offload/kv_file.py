"""One block of K/V in a file: a header that identifies it, the K/V, and a checksum over both.

magic, 8 bytes | length of the header, 4 bytes | header | K/V | xxh3-64 of all before it, 8 bytes

The checksum detects accidents. It has no key: a user who can write in the folder can change the K/V.
"""

from __future__ import annotations

import os
import secrets
import stat
import struct
from contextlib import suppress
from pathlib import Path

import xxhash

MAGIC = b"nanokv\x03\n"
UNFINISHED = ".tmp"
_LENGTH = struct.Struct("<I")
_CHECKSUM = struct.Struct("<Q")


class BadKVFile(Exception):
    """A file that is not one of this engine, or is damaged."""


def file_bytes(header: bytes, payload_bytes: int) -> int:
    """Size of a file."""
    return len(_start(header)) + payload_bytes + _CHECKSUM.size


def write_kv_file(path: Path, header: bytes, payload: bytes | memoryview) -> None:
    """Write a block, readable for its owner only. A reader sees all of it or nothing, even if this process is killed.

    Raises:
        OSError: it cannot be written; an older file is unchanged.
    """
    checksum = xxhash.xxh3_64(_start(header))
    checksum.update(payload)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            file.write(_start(header))
            file.write(payload)
            file.write(_CHECKSUM.pack(checksum.intdigest()))
        os.replace(unfinished, path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise


def read_kv_file(path: Path, header: bytes, payload: memoryview) -> None:
    """Read a block into `payload`, which is valid only if this returns. The file counts as used now.

    Args:
        header: that the file must have.

    Raises:
        BadKVFile: missing, truncated, altered, of another size, not a regular file, or with another header.
    """
    start = _start(header)
    try:
        with open(_open_regular(path), "rb") as file:
            first = file.read(len(start))
            num_read = file.readinto(payload)
            end = file.read(_CHECKSUM.size + 1)
            with suppress(OSError):
                os.utime(file.fileno())
    except OSError as error:
        raise BadKVFile(f"it cannot be read: {error}") from error
    if first[: len(MAGIC)] != MAGIC:
        raise BadKVFile("it is not a file of KV blocks")
    if first != start:
        raise BadKVFile("it holds other tokens, or those of another model")
    if num_read != len(payload) or len(end) != _CHECKSUM.size:
        raise BadKVFile(f"it does not hold {len(payload)} bytes of K/V and a checksum")
    checksum = xxhash.xxh3_64(start)
    checksum.update(payload)
    if _CHECKSUM.pack(checksum.intdigest()) != end:
        raise BadKVFile("its checksum is wrong: it was altered")


def _open_regular(path: Path) -> int:
    """Open a regular file. A link, pipe or device is refused: reading it may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadKVFile("it is not a regular file")
    return descriptor


def _start(header: bytes) -> bytes:
    return MAGIC + _LENGTH.pack(len(header)) + header
