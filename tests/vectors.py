"""Where `tests/vectors.sh` puts the files of llama.cpp that tokenizers and chat templates are compared with."""

from __future__ import annotations

import os
import struct
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(os.environ.get("NANOENGINE_VECTORS") or Path.home() / ".cache/nanoengine/vectors")


def vectors(pattern: str) -> list[Path]:
    """The files that match; if there is none, the test is skipped."""
    found = sorted(FOLDER.glob(pattern))
    if not found:
        pytest.skip(f"no {pattern} in {FOLDER}: run tests/vectors.sh, or set NANOENGINE_VECTORS")
    return found


def read_metadata(path: Path) -> dict[str, Any]:
    """The table of a GGUF file (version 3), read without the product's reader, and faster than with the package gguf."""
    numbers = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}
    with open(path, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        at = 24

        def number(form: str) -> Any:
            nonlocal at
            at += struct.calcsize(form)
            return struct.unpack_from("<" + form, data, at - struct.calcsize(form))[0]

        def text() -> str:
            nonlocal at
            length = number("Q")
            at += length
            return data[at - length : at].decode()

        def value(kind: int) -> Any:
            nonlocal at
            if kind == 8:
                return text()
            if kind != 9:
                return number(numbers[kind])
            item, length = number("I"), number("Q")
            if item == 8:
                return [text() for _ in range(length)]
            array = np.frombuffer(data, np.dtype("<" + numbers[item]), length, at).copy()
            at += array.nbytes
            return array

        (num_keys,) = struct.unpack_from("<Q", data, 16)
        return {text(): value(number("I")) for _ in range(num_keys)}
