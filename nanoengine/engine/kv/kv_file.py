"""One block of K/V in a file: a header that says what it is, the K/V, and a checksum over both.

magic, 8 bytes | length of the header, 4 bytes | header | K/V | xxh3-64 of all before it, 8 bytes
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path

import xxhash

MAGIC = b"nanokv\x02\n"
_LENGTH = struct.Struct("<I")
_CHECKSUM = struct.Struct("<Q")


class BadKVFile(Exception):
    """A file that is none of ours, or no longer what it was."""


def file_bytes(header: bytes, payload_bytes: int) -> int:
    """Size of such a file."""
    return len(_start(header)) + payload_bytes + _CHECKSUM.size


def write_kv_file(path: Path, header: bytes, payload: bytes | memoryview) -> None:
    """Write a block. A reader sees all of it or none, wherever this process is killed.

    Raises:
        OSError: it cannot be written; what was there before, still is.
    """
    checksum = xxhash.xxh3_64(_start(header))
    checksum.update(payload)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "wb") as file:
            file.write(_start(header))
            file.write(payload)
            file.write(_CHECKSUM.pack(checksum.intdigest()))
        os.replace(unfinished, path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise


def read_kv_file(path: Path, header: bytes, payload: memoryview) -> None:
    """Read a block into `payload`, which holds what the file says only if this returns.

    Args:
        header: what the file must say of itself.

    Raises:
        BadKVFile: missing, truncated, altered, of another size, or not what it should be.
    """
    start = _start(header)
    try:
        with open(path, "rb") as file:
            found = file.read(len(start))
            num_read = file.readinto(payload)
            end = file.read(_CHECKSUM.size + 1)
    except OSError as error:
        raise BadKVFile(f"it cannot be read: {error}") from error
    if found[: len(MAGIC)] != MAGIC:
        raise BadKVFile("it is not a file of KV blocks")
    if found != start:
        raise BadKVFile("it holds other tokens, or those of another model")
    if num_read != len(payload) or len(end) != _CHECKSUM.size:
        raise BadKVFile(f"it does not hold {len(payload)} bytes of K/V and a checksum")
    checksum = xxhash.xxh3_64(start)
    checksum.update(payload)
    if _CHECKSUM.pack(checksum.intdigest()) != end:
        raise BadKVFile("its checksum is wrong: it was altered")


def _start(header: bytes) -> bytes:
    return MAGIC + _LENGTH.pack(len(header)) + header
