"""GGUFFile: a memory-mapped GGUF file, whole or split."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import ACCESS_COPY, mmap
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoengine.errors import InvalidWeights, ModelNotFound, shown
from nanoengine.models.gguf.header import TensorRecord, read_header

PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)
"""The name of one of several files of a model; the first has the metadata."""


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A GGUF file, or all parts of one that was split, memory-mapped."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorRecord]
    parts: list[mmap]

    @staticmethod
    def open(path: Path) -> GGUFFile:
        """Open the file at `path` and the further parts beside it, if it is the first of several.

        Raises:
            ModelNotFound: no such file, or a part is missing.
            InvalidWeights: a damaged or foreign file, or parts of different models.
            UnsupportedModel: another version or byte order, a tensor type that is not read, an array of arrays.
        """
        first = _read_part(path, 0)
        count = _split(first, "split.count", default=1)
        if count <= 1:
            return first
        parts, tensors = first.parts, dict(first.tensors)
        for number, part_path in enumerate(_part_paths(first, count)[1:], 1):
            part = _read_part(part_path, number)
            _check_part(part, first, number, count)
            if twice := tensors.keys() & part.tensors.keys():
                again = f"holds {shown(min(twice))} again, which another part holds"
                raise InvalidWeights(f"{part_path} {again}: fetch both anew")
            tensors |= part.tensors
            parts = parts + part.parts
        total = _split(first, "split.tensors.count", default=len(tensors))
        if total != len(tensors):
            raise InvalidWeights(
                f"the {count} parts of {path} hold {len(tensors)} tensors, not {total} as the first says"
            )
        return GGUFFile(path, first.metadata, tensors, parts)

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, as a view of the mapped file. Writing there does not reach the file."""
        record = self.tensors[name]
        return np.frombuffer(self.parts[record.part], np.uint8, record.nbytes, record.offset)


def _read_part(path: Path, number: int) -> GGUFFile:
    try:
        if not path.is_file():
            raise FileNotFoundError("no such file")  # a pipe or a device has no end
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise InvalidWeights(f"{path} is empty: fetch it again")
            # A private mapping: torch warns of tensors in a read-only one.
            content = mmap(file.fileno(), 0, access=ACCESS_COPY)
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error}") from error
    return GGUFFile(path, *read_header(path, content, number), [content])


def _part_paths(first: GGUFFile, count: int) -> list[Path]:
    """The paths of `count` parts; InvalidWeights unless `first` is the first part, under the name of one."""
    path = first.path
    match = PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise InvalidWeights(
            f"{path} is one of {count} parts, which must be named NAME-00001-of-{count:05}.gguf and so on: rename them"
        )
    paths = [path.with_name(f"{match['stem']}-{number + 1:05}-of-{count:05}.gguf") for number in range(count)]
    if (number := _split(first, "split.no")) != 0 or path != paths[0]:
        raise InvalidWeights(f"{path} is part {number + 1} of {count}: give the first, {paths[0].name}")
    return paths


def _check_part(part: GGUFFile, first: GGUFFile, number: int, count: int) -> None:
    """Raise InvalidWeights if a part is another than expected, or contradicts the metadata of the first."""
    if (_split(part, "split.no"), _split(part, "split.count")) != (number, count):
        raise InvalidWeights(f"{part.path} does not say that it is part {number + 1} of {count}: fetch it again")
    for key in part.metadata.keys() & first.metadata.keys() - {"split.no"}:
        value, expected = part.metadata[key], first.metadata[key]
        # Lists of strings as they are: in numpy, each string would have the size of the longest.
        equal = np.array_equal if isinstance(value, np.ndarray) else eq
        if type(value) is not type(expected) or not equal(value, expected):
            raise InvalidWeights(
                f"{part.path} and {first.path.name} disagree about {key}: they are of different models"
            )


def _split(part: GGUFFile, key: str, default: int | None = None) -> int:
    value = part.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise InvalidWeights(f"{part.path} has {key} {shown(value)}, not a count: fetch it again")
    return value
