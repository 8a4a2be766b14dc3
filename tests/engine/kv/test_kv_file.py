from __future__ import annotations

import struct
from pathlib import Path

import pytest
import xxhash

from nanoengine.engine.kv.kv_file import MAGIC, BadKVFile, encode_header, read_kv_file, write_kv_file

HEADER = {"tokens": "00ff", "hash": "ab"}


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "block.kv"
    write_kv_file(path, encode_header(HEADER), bytes(range(100)))
    return path


def sealed(content: bytes) -> bytes:
    """Any content with the checksum that belongs to it."""
    return content + struct.pack("<Q", xxhash.xxh3_64_intdigest(content))


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 40])
def test_what_is_written_is_read_back(payload: bytes, tmp_path: Path) -> None:
    path = tmp_path / "block.kv"
    write_kv_file(path, encode_header(HEADER), payload)
    header, read = read_kv_file(path)
    assert header == HEADER
    assert bytes(read) == payload


def test_equal_headers_have_equal_bytes() -> None:
    assert encode_header({"a": "1", "b": "2"}) == encode_header({"b": "2", "a": "1"})


def test_writing_again_replaces_the_file_and_leaves_no_other(sound: Path) -> None:
    write_kv_file(sound, encode_header(HEADER), b"new")
    assert bytes(read_kv_file(sound)[1]) == b"new"
    assert [file.name for file in sound.parent.iterdir()] == ["block.kv"]


def test_a_write_that_breaks_off_leaves_the_old_file(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", break_off)
    with pytest.raises(OSError, match="no space left"):
        write_kv_file(sound, encode_header(HEADER), b"new")
    assert bytes(read_kv_file(sound)[1]) == bytes(range(100))


def test_a_missing_file_is_bad(tmp_path: Path) -> None:
    with pytest.raises(BadKVFile, match="cannot be read"):
        read_kv_file(tmp_path / "none.kv")


def test_a_folder_is_bad(tmp_path: Path) -> None:
    with pytest.raises(BadKVFile, match="cannot be read"):
        read_kv_file(tmp_path)


def test_a_file_cut_off_anywhere_is_bad(sound: Path) -> None:
    whole = sound.read_bytes()
    for length in range(len(whole)):
        sound.write_bytes(whole[:length])
        with pytest.raises(BadKVFile):
            read_kv_file(sound)


def test_a_file_with_any_byte_altered_is_bad(sound: Path) -> None:
    whole = sound.read_bytes()
    for at in range(len(whole)):
        sound.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(BadKVFile):
            read_kv_file(sound)


def test_a_file_with_something_behind_it_is_bad(sound: Path) -> None:
    sound.write_bytes(sound.read_bytes() + b"\0")
    with pytest.raises(BadKVFile, match="checksum"):
        read_kv_file(sound)


@pytest.mark.parametrize("content", [b"", b"short", b"something else entirely, but long enough" * 3])
def test_a_file_of_another_kind_is_bad(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "block.kv"
    path.write_bytes(content)
    with pytest.raises(BadKVFile, match="not a file of KV blocks"):
        read_kv_file(path)


@pytest.mark.parametrize("header", [b"no JSON", b"\xff\xfe", b'{"cut": '])
def test_a_header_that_is_no_json_is_bad_even_if_its_checksum_is_right(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "block.kv"
    path.write_bytes(sealed(MAGIC + struct.pack("<I", len(header)) + header + b"payload"))
    with pytest.raises(BadKVFile):
        read_kv_file(path)


def test_a_header_longer_than_its_file_is_bad_even_if_its_checksum_is_right(tmp_path: Path) -> None:
    path = tmp_path / "block.kv"
    path.write_bytes(sealed(MAGIC + struct.pack("<I", 10_000) + b"{}"))
    with pytest.raises(BadKVFile):
        read_kv_file(path)
