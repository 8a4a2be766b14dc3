from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import xxhash

from nanoengine.engine.kv.kv_file import MAGIC, BadKVFile, file_bytes, read_kv_file, write_kv_file

HEADER = b'{"tokens": "00ff"}'
PAYLOAD = bytes(range(100))


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "block.kv"
    write_kv_file(path, HEADER, PAYLOAD)
    return path


def read(path: Path, header: bytes = HEADER, size: int = len(PAYLOAD)) -> bytes:
    payload = bytearray(size)
    read_kv_file(path, header, memoryview(payload))
    return bytes(payload)


def sealed(content: bytes) -> bytes:
    """Any content with the checksum that belongs to it."""
    return content + struct.pack("<Q", xxhash.xxh3_64_intdigest(content))


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 40])
def test_what_is_written_is_read_back(payload: bytes, tmp_path: Path) -> None:
    path = tmp_path / "block.kv"
    write_kv_file(path, HEADER, payload)
    assert read(path, size=len(payload)) == payload
    assert path.stat().st_size == file_bytes(HEADER, len(payload))


def test_the_checksum_is_of_all_before_it(sound: Path) -> None:
    assert sound.read_bytes() == sealed(MAGIC + struct.pack("<I", len(HEADER)) + HEADER + PAYLOAD)


def test_writing_again_replaces_the_file_and_leaves_no_other(sound: Path) -> None:
    write_kv_file(sound, HEADER, b"new")
    assert read(sound, size=3) == b"new"
    assert [file.name for file in sound.parent.iterdir()] == ["block.kv"]


def test_a_write_that_breaks_off_leaves_the_old_file_and_nothing_else(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", break_off)
    with pytest.raises(OSError, match="no space left"):
        write_kv_file(sound, HEADER, b"new")
    assert read(sound) == PAYLOAD
    assert os.listdir(sound.parent) == ["block.kv"]


def test_a_missing_file_is_bad(tmp_path: Path) -> None:
    with pytest.raises(BadKVFile, match="cannot be read"):
        read(tmp_path / "none.kv")


def test_a_folder_is_bad(tmp_path: Path) -> None:
    with pytest.raises(BadKVFile, match="cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize("header", [b"", HEADER[:-1], HEADER.replace(b"00", b"01"), HEADER + b" "])
def test_another_header_than_the_expected_one_is_bad(header: bytes, sound: Path) -> None:
    with pytest.raises(BadKVFile, match="other tokens"):
        read(sound, header)


@pytest.mark.parametrize("size", [0, 99, 101])
def test_another_size_than_the_expected_one_is_bad(size: int, sound: Path) -> None:
    with pytest.raises(BadKVFile, match=f"{size} bytes"):
        read(sound, size=size)


def test_every_cut_is_noticed(sound: Path) -> None:
    content = sound.read_bytes()
    for length in range(len(content)):
        sound.write_bytes(content[:length])
        with pytest.raises(BadKVFile):
            read(sound)


def test_every_flipped_bit_is_noticed(sound: Path) -> None:
    content = sound.read_bytes()
    for at in range(len(content)):
        sound.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        with pytest.raises(BadKVFile):
            read(sound)


@pytest.mark.parametrize("content", [b"", b"x", b"x" * 1000, sealed(b""), sealed(b"x" * 100), sealed(MAGIC)])
def test_foreign_content_is_bad_even_with_a_checksum(content: bytes, sound: Path) -> None:
    sound.write_bytes(content)
    with pytest.raises(BadKVFile):
        read(sound)


def test_what_follows_the_checksum_is_noticed(sound: Path) -> None:
    sound.write_bytes(sound.read_bytes() + b"x")
    with pytest.raises(BadKVFile):
        read(sound)
