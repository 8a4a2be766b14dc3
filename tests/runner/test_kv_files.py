"""KVFiles: everything is answered once, in order, and nothing is lost or read twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoengine.engine.messages import FileDone, FileRead, FileWrite, Place, Tier
from nanoengine.runner import kv_files as module
from nanoengine.runner.kv_files import KVFiles

CONTENT = bytes(range(100))


@pytest.fixture
def files() -> Iterator[KVFiles]:
    opened = KVFiles()
    yield opened
    opened.close()


def write_order(path: Path) -> FileWrite:
    return FileWrite(str(path), b"header", Place(Tier.DEVICE, 1))


def read_order(path: Path, header: bytes = b"header") -> FileRead:
    return FileRead(str(path), header, 0)


def all_of(files: KVFiles, count: int) -> list[FileDone]:
    done: list[FileDone] = []
    while len(done) < count:
        done += files.finished(wait=True)
    return done


def test_what_is_written_is_read_and_both_are_answered_in_order(files: KVFiles, tmp_path: Path) -> None:
    found = bytearray(len(CONTENT))
    files.write(write_order(tmp_path / "a.kv"), memoryview(CONTENT))
    files.read(read_order(tmp_path / "a.kv"), memoryview(found))
    assert all_of(files, 2) == [FileDone(str(tmp_path / "a.kv"))] * 2
    assert bytes(found) == CONTENT
    assert files.finished(wait=True) == [], "nothing is left to wait for"


def test_a_file_that_is_missing_or_says_something_else_is_a_problem(files: KVFiles, tmp_path: Path) -> None:
    files.write(write_order(tmp_path / "a.kv"), memoryview(CONTENT))
    files.read(read_order(tmp_path / "none.kv"), memoryview(bytearray(100)))
    files.read(read_order(tmp_path / "a.kv", b"other!"), memoryview(bytearray(100)))
    written, missing, other = all_of(files, 3)
    assert written.problem is None
    assert "cannot be read" in str(missing.problem)
    assert "other tokens" in str(other.problem)


def test_a_write_that_cannot_begin_is_answered_too(files: KVFiles, tmp_path: Path) -> None:
    files.refuse(write_order(tmp_path / "a.kv"), RuntimeError("out of memory"))
    [done] = all_of(files, 1)
    assert "out of memory" in str(done.problem)
    assert not (tmp_path / "a.kv").exists()


def test_a_file_is_deleted_in_its_turn_and_nobody_is_told(files: KVFiles, tmp_path: Path) -> None:
    files.write(write_order(tmp_path / "a.kv"), memoryview(CONTENT))
    files.delete(str(tmp_path / "a.kv"))
    files.delete(str(tmp_path / "none.kv"))
    files.read(read_order(tmp_path / "a.kv"), memoryview(bytearray(100)))
    assert [done.problem is None for done in all_of(files, 2)] == [True, False]


def test_a_read_that_is_under_way_is_begun_once_and_one_that_is_over_again(
    files: KVFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, num_reads = threading.Event(), []

    def slow_read(path: Path, header: bytes, into: memoryview) -> None:  # noqa: ARG001
        num_reads.append(path)
        may_go_on.wait(10)

    monkeypatch.setattr(module, "read_kv_file", slow_read)
    order, room = read_order(tmp_path / "a.kv"), memoryview(bytearray(100))
    files.read(order, room)
    files.read(order, room)
    may_go_on.set()
    assert len(all_of(files, 1)) == len(num_reads) == 1
    files.read(order, room)
    assert len(all_of(files, 1)) == 1
    assert len(num_reads) == 2


def test_what_waits_to_be_written_is_bounded(files: KVFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNWRITTEN", 150)
    for number in range(5):
        files.wait_for_room(len(CONTENT))
        assert files._num_unwritten <= 50
        files.write(write_order(tmp_path / f"{number}.kv"), memoryview(CONTENT))
    assert len(all_of(files, 5)) == 5


def test_closing_finishes_what_was_begun(tmp_path: Path) -> None:
    files = KVFiles()
    for number in range(20):
        files.write(write_order(tmp_path / f"{number}.kv"), memoryview(CONTENT))
    files.close()
    assert len(list(tmp_path.glob("*.kv"))) == 20
