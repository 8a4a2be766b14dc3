"""Headers of GGUF files: everything sound is read as it was written, and everything else is a named error, found quickly."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.errors import InvalidWeights, UnsupportedModel
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.gguf.header import _Cursor

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10
"""Numbers of metadata types."""

Q4_1 = GGMLQuantizationType.Q4_1


def text(value: str | bytes) -> bytes:
    encoded = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(encoded)) + encoded


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + values


def record(name: str | bytes = "w", shape: Sequence[int] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    """An entry in the list of tensors; the shape as files have it, rows last."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(
    pairs: Sequence[bytes] = (),
    records: Sequence[bytes] = (),
    *,
    magic: bytes = b"GGUF",
    version: bytes = b"\3\0\0\0",
    counts: tuple[int, int] | None = None,
) -> bytes:
    tensors, keys = counts or (len(records), len(pairs))
    return magic + version + struct.pack("<QQ", tensors, keys) + b"".join([*pairs, *records])


def padded(content: bytes, data: bytes = bytes(64), alignment: int = 32) -> bytes:
    return content + bytes(-len(content) % alignment) + data


def open_bytes(content: bytes, folder: Path) -> GGUFFile:
    path = folder / "file.gguf"
    path.write_bytes(content)
    return GGUFFile.open(path)


VALUES = {"uint8": 200, "int8": -100, "uint16": 60000, "int16": -30000, "uint32": 4_000_000_000}
VALUES |= {"int32": -2_000_000_000, "uint64": 2**64 - 1, "int64": -(2**63), "float32": 1e-5, "float64": 0.1}
VALUES |= {"bool": True, "string": "grüße 🦙"}
STRINGS = ["", "ä", "longer than the others", "🦙"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "sound.gguf"
    writer = GGUFWriter(path, "llama")
    for kind, value in VALUES.items():
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    writer.add_array("strings", STRINGS)
    writer.add_array("numbers", [1, 2, 300_000])
    writer.add_array("floats", [0.5, -1e-5])
    writer.add_array("truths", [True, False])
    writer.add_tensor("rows", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("halves", np.ones(5, np.float16))
    quantized = quantize(np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64), Q4_1)
    writer.add_tensor("blocks", quantized, raw_dtype=Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_every_type_of_value_is_read_as_it_was_written(sound: bytes, tmp_path: Path) -> None:
    metadata = dict(open_bytes(sound, tmp_path).metadata)
    arrays = {key: value for key, value in metadata.items() if isinstance(value, np.ndarray)}
    plain = {f"a.{kind}": value for kind, value in VALUES.items()}
    assert metadata == arrays | plain | {"general.architecture": "llama", "strings": STRINGS}
    assert {type(value) for key, value in metadata.items() if key in plain} == {int, float, bool, str}
    assert arrays.keys() == {"numbers", "floats", "truths"}
    np.testing.assert_array_equal(arrays["numbers"], [1, 2, 300_000])
    np.testing.assert_array_equal(arrays["floats"], np.float32([0.5, -1e-5]))
    assert arrays["truths"].dtype == bool
    assert arrays["truths"].tolist() == [True, False]


def test_tensors_have_their_rows_first_and_their_bytes(sound: bytes, tmp_path: Path) -> None:
    file = open_bytes(sound, tmp_path)
    found = {name: (record.type, record.shape, record.nbytes) for name, record in file.tensors.items()}
    assert found == {"rows": ("F32", (3, 4), 48), "halves": ("F16", (5,), 10), "blocks": ("Q4_1", (2, 64), 80)}
    np.testing.assert_array_equal(file.data("rows").view(np.float32), np.arange(12))
    np.testing.assert_array_equal(file.data("halves").view(np.float16), np.ones(5))
    assert file.data("blocks").nbytes == 80


def test_a_file_cut_anywhere_is_damaged(sound: bytes, tmp_path: Path) -> None:
    end = len(sound.rstrip(b"\0"))
    for size in [*range(0, end, 7), end - 1]:
        with pytest.raises(InvalidWeights):
            open_bytes(sound[:size], tmp_path)


@settings(max_examples=300)
@given(data=st.data())
def test_flipped_bytes_raise_named_errors_or_none(sound: bytes, tmp_path_factory: Any, data: st.DataObject) -> None:
    content = bytearray(sound)
    for at in data.draw(st.lists(st.integers(0, len(sound) - 1), min_size=1, max_size=4)):
        content[at] ^= data.draw(st.integers(1, 255))
    try:
        file = open_bytes(bytes(content), tmp_path_factory.getbasetemp())
    except (InvalidWeights, UnsupportedModel):
        return
    assert all(file.data(name).nbytes == record.nbytes for name, record in file.tensors.items())


HUGE = 2**63
DAMAGED = {
    "is empty": b"",
    "is no GGUF file": b"GGML" + bytes(60),
    "bytes for the magic": b"GG",
    "9223372036854775808 tensors": header(counts=(HUGE, 0)),
    "9223372036854775808 keys": header(counts=(0, HUGE)),
    "9223372036854775808 bytes for a key": header(counts=(0, 1)) + struct.pack("<Q", HUGE) + bytes(8),
    "9223372036854775808 strings": header([pair("k", ARRAY, array(STRING, HUGE, b""))]) + bytes(99),
    "9223372036854775808 numbers": header([pair("k", ARRAY, array(U8, HUGE, b""))]) + bytes(99),
    "33 numbers": header([pair("k", ARRAY, array(U64, 33, bytes(8 * 32)))]),
    "strings in 'k' that go on": header([pair("k", ARRAY, array(STRING, 2, text("a") + struct.pack("<Q", HUGE)))]),
    "a value of type 13 in 'k'": header([pair("k", 13, bytes(8))]),
    "a value of type 99 in 'k'": header([pair("k", ARRAY, array(99, 1, bytes(8)))]),
    "neither 0 nor 1": header([pair("k", BOOL, b"\2")]),
    "in 'truths' that is neither": header([pair("truths", ARRAY, array(BOOL, 2, b"\1\2"))]),
    "no UTF-8 before byte 46": header([pair("k", STRING, text(b"\xff"))]),
    "no UTF-8 before byte 58": header([pair("k", ARRAY, array(STRING, 1, text(b"\xc3")))]),
    "the key 'k' again": header([pair("k", U8, b"\1"), pair("k", U8, b"\1")]),
    "the key '' without a name": header([pair("", U8, b"\1")]),
    "general.alignment 24": header([pair("general.alignment", U32, struct.pack("<I", 24))]),
    "general.alignment 0": header([pair("general.alignment", U32, struct.pack("<I", 0))]),
    "general.alignment 32.0": header([pair("general.alignment", F32, struct.pack("<f", 32))]),
    "of 0 dimensions": padded(header(records=[record(shape=())])),
    "of 5 dimensions": padded(header(records=[record(shape=(1, 1, 1, 1, 1))])),
    "of 4294967295 dimensions": padded(header(counts=(1, 0)) + text("w") + b"\xff" * 28),
    r"of shape \[0, 4\]": padded(header(records=[record(shape=(4, 0))])),
    "rows of Q4_0 are multiples of 32": padded(header(records=[record(shape=(48, 2), kind=2)])),
    "beyond its end": padded(header(records=[record(shape=(17,))])),
    "up to byte 147573952589676413024": padded(header(records=[record(shape=(2**32, 2**33))])),
    "at byte 68, which": padded(header(records=[record(offset=4)])),
    "where another has its bytes": padded(header(records=[record("v", (9,)), record("w", offset=32)])),
    "two tensors of one name": padded(header(records=[record(), record(offset=32)])),
}


UNSUPPORTED = {
    **{f"is of version {number}": header(version=bytes([number, 0, 0, 0])) for number in (1, 2, 4)},
    "is big-endian": header(version=b"\0\0\0\3"),
    "in type Q8_K": padded(header(records=[record(shape=(256,), kind=15)])),
    "in type number 4096": padded(header(records=[record(kind=4096)])),
    "an array of arrays in 'k'": header([pair("k", ARRAY, array(ARRAY, 1, array(U8, 0, b"")))]),
}


@pytest.mark.parametrize(
    ("error", "message", "content"),
    [
        *((InvalidWeights, message, content) for message, content in DAMAGED.items()),
        *((UnsupportedModel, message, content) for message, content in UNSUPPORTED.items()),
    ],
    ids=[*DAMAGED, *UNSUPPORTED],
)
def test_a_file_that_is_damaged_hostile_or_not_read_is_a_named_error(
    error: type[Exception], message: str, content: bytes, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        open_bytes(content, tmp_path)


def test_the_alignment_of_the_file_counts(tmp_path: Path) -> None:
    content = header([pair("general.alignment", U32, struct.pack("<I", 128))], [record(), record("v", offset=128)])
    file = open_bytes(padded(content, bytes(range(144)), 128), tmp_path)
    assert bytes(file.data("w")) == bytes(range(16))
    assert bytes(file.data("v")) == bytes(range(128, 144))


TOO_MUCH = {
    "tensors": (header([], [record()] * 20_000), "20000 tensors"),
    "keys": (header([pair(f"{number}", U8, b"1") for number in range(20_000)]), "20000 keys"),
    "strings": (
        header([pair("a", ARRAY, array(STRING, 1 << 30, b""))]),
        "strings at byte .*, at most 2097152,",
    ),
    "numbers": (header([pair("a", ARRAY, array(U64, 1 << 30, b""))]), "1073741824 numbers"),
    "text": (header([pair("a", STRING, struct.pack("<Q", 1 << 33))]), "8589934592 bytes for a"),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_a_header_that_would_take_long_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Of a file that has all these bytes, and that take no room."""
    content, message = TOO_MUCH[what]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    os.truncate(path, 1 << 34)
    read = []
    value = _Cursor.value
    monkeypatch.setattr(_Cursor, "value", lambda *own: read.append(own) or value(*own))
    with pytest.raises(InvalidWeights, match=message):
        GGUFFile.open(path)
    assert len(read) < 2
