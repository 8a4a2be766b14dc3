"""The header of a GGUF file: metadata and records of tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3, little-endian. Every number of a file is compared
with the size of the file before it is used.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoengine.errors import InvalidWeights, UnsupportedModel, shown
from nanoengine.kernels.quantized.ggml_formats import FORMATS, OTHER_TYPES

MAGIC, VERSION = b"GGUF", 3
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", BOOL: "u1", 10: "u8", 11: "i8", 12: "f8"}
"""Number of a metadata type -> the numpy type of its values, all little-endian."""

LENGTH = struct.Struct("<Q")
MAX_BYTES, MAX_ENTRIES, MAX_STRINGS = 64 << 20, 1 << 14, 1 << 21
"""Of a header, of its keys or tensors, and of an array's strings; those of the largest vocabularies have a quarter of it."""

SMALLEST_PAIR, SMALLEST_RECORD = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
"""Bytes of the shortest pair of key and value, and of the shortest entry in the list of tensors."""


@dataclass(frozen=True)
class TensorRecord:
    """The record of a tensor in the header of its file."""

    name: str
    type: str  # name of its format, such as "Q4_1"
    shape: tuple[int, ...]  # rows first, as torch has it; files have it the other way round
    nbytes: int
    part: int  # index of its file
    offset: int  # of its first byte in that file


def read_header(path: Path, content: mmap, part: int = 0) -> tuple[dict[str, Any], dict[str, TensorRecord]]:
    """Metadata and tensors of a file.

    Values are bool, int, float, str, a list of str, or a numpy array. A float32 becomes the shortest decimal that rounds to it:
    1e-05, not 9.999999747378752e-06.

    Args:
        path: its name, for messages.
        content: all its bytes.
        part: index of the file, for the records.

    Raises:
        InvalidWeights: a damaged or foreign file.
        UnsupportedModel: another version or byte order, a tensor type that is not read, an array of arrays.
    """
    cursor = _Cursor(path, content)
    if cursor.take(4, "the magic") != MAGIC:
        raise InvalidWeights(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}")
    version = cursor.number("u4")
    if version != VERSION:
        what = "big-endian" if version and version % 65536 == 0 else f"of version {version}"
        raise UnsupportedModel(
            f"{path} is {what}; little-endian files of version {VERSION} are read: convert the model anew"
        )
    tensors = cursor.count(SMALLEST_RECORD, "tensors")
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count(SMALLEST_PAIR, "keys")):
        key = cursor.string("a key")
        if not key or key in metadata:
            raise cursor.damaged(f"the key {shown(key)} {'again' if key else 'without a name'}")
        metadata[key] = cursor.value(cursor.number("u4"), key)
    return metadata, _read_records(cursor, tensors, _alignment(cursor, metadata), part)


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment {shown(alignment)}, which is no power of two")
    return alignment


def _read_records(cursor: _Cursor, count: int, alignment: int, part: int) -> dict[str, TensorRecord]:
    """The list of tensors, with their offsets counted from the start of the file."""
    records = [_read_record(cursor, part) for _ in range(count)]
    start = -(-cursor.at // alignment) * alignment
    records = [replace(record, offset=start + record.offset) for record in records]
    end = start
    for record in sorted(records, key=lambda record: record.offset):
        name = f"the tensor {shown(record.name)}"
        if record.offset % alignment:
            raise cursor.damaged(f"{name} at byte {record.offset}, which is no multiple of {alignment}")
        if record.offset < end:
            raise cursor.damaged(f"{name} at byte {record.offset}, where another has its bytes")
        end = record.offset + record.nbytes
        if end > cursor.size:
            raise cursor.damaged(f"{name} up to byte {end}, beyond its end at {cursor.size}")
    tensors = {record.name: record for record in records}
    if len(tensors) < len(records):
        raise cursor.damaged("two tensors of one name")
    return tensors


def _read_record(cursor: _Cursor, part: int) -> TensorRecord:
    name = cursor.string("the name of a tensor")
    dimensions = cursor.number("u4")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.damaged(f"the tensor {shown(name)} of {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
    shape = tuple(cursor.number("u8") for _ in range(dimensions))[::-1]
    number = cursor.number("u4")
    if number not in FORMATS:
        kind = OTHER_TYPES.get(number, f"number {number}")
        read = ", ".join(known.name for known in FORMATS.values())
        raise UnsupportedModel(f"{cursor.path} has {shown(name)} in type {kind}; these are read: {read}")
    kind, values, nbytes = FORMATS[number]
    if 0 in shape or shape[-1] % values:
        raise cursor.damaged(
            f"the tensor {shown(name)} of shape {list(shape)}, but rows of {kind} are multiples of {values}"
        )
    return TensorRecord(name, kind, shape, math.prod(shape) // values * nbytes, part, cursor.number("u8"))


class _Cursor:
    """A reader of one value after the other, never beyond the end of the file."""

    def __init__(self, path: Path, content: mmap):
        self.path, self.size, self.at, self._content = path, len(content), 0, content
        self._end = min(self.size, MAX_BYTES)

    def damaged(self, what: str) -> InvalidWeights:
        return InvalidWeights(f"{self.path} is damaged, it has {what}: fetch it again")

    def take(self, nbytes: int, what: str) -> bytes:
        """The next bytes of the file."""
        if nbytes > self._end - self.at:
            raise self.damaged(f"{nbytes} bytes for {what} at byte {self.at}, and {self._end} in all or for its header")
        self.at += nbytes
        return self._content[self.at - nbytes : self.at]

    def number(self, dtype: str) -> Any:
        return self._numbers(1, dtype, "a number")[0].item()

    def count(self, smallest: int, what: str) -> int:
        """A number of entries that follow, each of `smallest` bytes or more."""
        count = int(self.number("u8"))
        most = {"strings": MAX_STRINGS, "numbers": MAX_BYTES}.get(what, MAX_ENTRIES)
        if count > min((self._end - self.at) // smallest, most):
            raise self.damaged(
                f"{count} {what} at byte {self.at}, at most {most}, and {self._end} bytes for its header"
            )
        return count

    def string(self, what: str) -> str:
        return self._texts([self.take(self.number("u8"), what)])[0]

    def value(self, kind: int, key: str) -> Any:
        """A value of the metadata, of the type with this number."""
        if kind == STRING:
            return self.string(key)
        if kind == ARRAY:
            return self._array(key)
        value = self._numbers(1, self._dtype(kind, key), key)[0]
        if kind == BOOL:
            return self._bools(value, key).item()
        return float(str(value)) if value.dtype == np.float32 else value.item()

    def _array(self, key: str) -> Any:
        kind = self.number("u4")
        if kind == ARRAY:
            raise UnsupportedModel(f"{self.path} has an array of arrays in {shown(key)}, which is not read")
        if kind == STRING:
            return self._strings(self.count(LENGTH.size, "strings"), key)
        dtype = self._dtype(kind, key)
        numbers = self._numbers(self.count(np.dtype(dtype).itemsize, "numbers"), dtype, key)
        return self._bools(numbers, key) if kind == BOOL else numbers

    def _strings(self, count: int, key: str) -> list[str]:
        """Many strings. Vocabularies have 150,000: each operation of this loop costs time."""
        content, at, size, length_at, strings = self._content, self.at, self._end, LENGTH.unpack_from, []
        for _ in range(count):
            start = at + LENGTH.size
            if start > size or (at := start + length_at(content, at)[0]) > size:
                raise self.damaged(f"strings in {shown(key)} that go on beyond its end at {size}")
            strings.append(content[start:at])
        self.at = at
        return self._texts(strings)

    def _numbers(self, count: int, dtype: str, what: str) -> NDArray[Any]:
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize, what), f"<{dtype}")

    def _dtype(self, kind: int, key: str) -> str:
        if kind not in NUMBERS:
            raise self.damaged(f"a value of type {kind} in {shown(key)}")
        return NUMBERS[kind]

    def _bools(self, values: Any, key: str) -> Any:
        if np.any(values > 1):
            raise self.damaged(f"a truth value in {shown(key)} that is neither 0 nor 1")
        return values.astype(bool)

    def _texts(self, strings: list[bytes]) -> list[str]:
        try:
            return list(map(bytes.decode, strings))
        except UnicodeDecodeError as error:
            raise self.damaged(f"text that is no UTF-8 before byte {self.at}: {shown(error.object)}") from error
