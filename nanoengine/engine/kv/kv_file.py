"""One block of K/V in a file: a header that says what it is, the K/V, and a checksum over both.

magic, 8 bytes | length of the header, 4 bytes | header, JSON | K/V | xxh3-64 of all before it, 8 bytes
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import xxhash

MAGIC = b"nanokv\x01\n"
_LENGTH = struct.Struct("<I")
_CHECKSUM = struct.Struct("<Q")


class BadKVFile(Exception):
    """A file that is none of ours, or no longer what it was."""


def encode_header(header: dict[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True).encode()


def file_bytes(header: bytes, payload_bytes: int) -> int:
    """Size of such a file."""
    return len(MAGIC) + _LENGTH.size + len(header) + payload_bytes + _CHECKSUM.size


def write_kv_file(path: Path, header: bytes, payload: bytes) -> None:
    """Write a block; a reader sees all of it or none."""
    content = b"".join((MAGIC, _LENGTH.pack(len(header)), header, payload))
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(unfinished, "wb") as file:
        file.write(content)
        file.write(_CHECKSUM.pack(xxhash.xxh3_64_intdigest(content)))
    os.replace(unfinished, path)


def read_kv_file(path: Path) -> tuple[dict[str, Any], memoryview]:
    """The header and the K/V of a block.

    Raises:
        BadKVFile: missing, truncated, altered, or not a file of this format.
    """
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        raise BadKVFile(f"it cannot be read: {error}") from error
    start = len(MAGIC) + _LENGTH.size
    if len(content) < start + _CHECKSUM.size or content[: len(MAGIC)] != MAGIC:
        raise BadKVFile("it is not a file of KV blocks")
    (checksum,) = _CHECKSUM.unpack(content[-_CHECKSUM.size :])
    content = content[: -_CHECKSUM.size]
    if xxhash.xxh3_64_intdigest(content) != checksum:
        raise BadKVFile("its checksum is wrong: it is truncated or altered")
    (length,) = _LENGTH.unpack(content[len(MAGIC) : start])
    if start + length > len(content):
        raise BadKVFile("its header is cut off")
    try:
        header = json.loads(bytes(content[start : start + length]))
    except ValueError as error:
        raise BadKVFile(f"its header is not JSON: {error}") from error
    return header, content[start + length :]
