"""Files of K/V: what is served is what was written, whoever else is in the folder, and nobody waits for ever."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nanoengine.features.kv_offload.file_thread import FileThread
from nanoengine.features.kv_offload.kv_file import BadKVFile, file_bytes, write_kv_file
from nanoengine.features.kv_offload.kv_folder import KVFolder
from tests.forks import begin

BYTES = 64
HEADER = b"header"
SIZE = file_bytes(HEADER, BYTES)
NAMES = [f"{number:032x}-0" for number in range(40)]


def make_folder(path: Path, *, fingerprint: str = "model", max_files: int = 30) -> KVFolder:
    return KVFolder(path, fingerprint, BYTES, max_files * SIZE)


def payload(number: int) -> memoryview:
    return memoryview(bytes([number]) * BYTES)


def fill(folder: KVFolder, *numbers: int) -> list[str]:
    """Write some files; returns which were deleted for them."""
    return [gone for number in numbers for gone in folder.write(NAMES[number], HEADER, payload(number))]


def served(folder: KVFolder, number: int) -> int | None:
    """What a file holds; None: it is bad."""
    found = bytearray(BYTES)
    try:
        folder.read(NAMES[number], HEADER, memoryview(found))
    except BadKVFile:
        return None
    assert len(set(found)) == 1
    return found[0]


# ---- the folder


def test_what_one_process_wrote_another_finds_and_other_models_do_not(tmp_path: Path) -> None:
    fill(make_folder(tmp_path / "a" / "b"), 1, 2)
    folder = make_folder(tmp_path / "a" / "b")
    assert folder.names == [NAMES[1], NAMES[2]]
    assert (served(folder, 1), served(folder, 2), served(folder, 3)) == (1, 2, None)
    assert not make_folder(tmp_path / "a" / "b", fingerprint="other").names


def test_files_the_seed_and_the_folder_are_for_their_owner_only(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    fill(folder, 1)
    assert folder.seed() == make_folder(tmp_path).seed() != make_folder(tmp_path, fingerprint="other").seed()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder.path, *folder.path.iterdir()]}
    assert modes == {"model": 0o700, f"{NAMES[1]}.kv": 0o600, "hash_seed": 0o600}


def test_processes_that_draw_a_seed_at_once_get_one_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    folders = [make_folder(tmp_path) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        seeds = list(pool.map(KVFolder.seed, folders))
    assert len(set(seeds)) == 1
    assert [path.name for path in folders[0].path.iterdir()] == ["hash_seed"]
    (folders[0].path / "hash_seed").write_bytes(b"123")
    with pytest.raises(OSError, match="delete the folder"):
        folders[0].seed()


def test_the_least_recently_used_make_room_in_this_process_and_later_ones(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, max_files=3)
    assert fill(folder, 1, 2, 3) == []
    for number, age in ((1, 30), (2, 20), (3, 10)):
        os.utime(folder.path / f"{NAMES[number]}.kv", (time.time() - age,) * 2)
    assert served(folder, 1) == 1
    assert fill(folder, 4) == [NAMES[2]]
    assert make_folder(tmp_path, max_files=3).names == [NAMES[3], NAMES[1], NAMES[4]]
    assert make_folder(tmp_path, max_files=2).names == [NAMES[1], NAMES[4]], "a lower limit holds at once"
    with pytest.raises(OSError, match="kv_disk_bytes"):
        KVFolder(tmp_path, "model", BYTES, SIZE - 1).write(NAMES[1], HEADER, payload(1))


def test_the_limit_counts_the_files_of_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = make_folder(tmp_path, max_files=3), make_folder(tmp_path, max_files=3)
    fill(one, 1, 2, 3)
    later = time.monotonic() + 100
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert fill(other, 4, 5) == [NAMES[1], NAMES[2]]
    one.clear()
    assert not make_folder(tmp_path).names, "a reset forgets the files of other processes, too"


def test_an_unfinished_file_of_a_live_writer_stays_and_that_of_a_dead_one_goes(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    for name, age in (("live", 1), ("dead", 4000)):
        path = folder.path / f"{NAMES[0]}.kv.{name}.tmp"
        path.write_bytes(b"x")
        os.utime(path, (time.time() - age,) * 2)
    assert make_folder(tmp_path).names == []
    assert [path.name for path in folder.path.iterdir()] == [f"{NAMES[0]}.kv.live.tmp"]


@pytest.mark.parametrize("target", ["elsewhere", "model"])
def test_a_link_in_place_of_the_folder_is_refused_and_nothing_behind_it_is_touched(tmp_path: Path, target: str) -> None:
    old = tmp_path / "elsewhere" / "precious.tmp"
    old.parent.mkdir()
    old.touch()
    os.utime(old, (1, 1))
    (tmp_path / "model").symlink_to(target)
    with pytest.raises(OSError, match="links are not followed"):
        make_folder(tmp_path)
    assert old.exists()


def instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Something else in place of a file."""
    return lambda path: (path.rename(path.with_suffix(".old")), make(path))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (instead(os.mkfifo), "not a regular file"),
    "link": (instead(lambda path: path.symlink_to(path.with_suffix(".old"))), "cannot be read"),
    "loop": (instead(lambda path: path.symlink_to(path)), "cannot be read"),
    "folder": (instead(os.mkdir), "not a regular file"),
    "none": (instead(lambda _: None), "cannot be read"),
    "cut": (lambda path: os.truncate(path, SIZE - 10), "does not hold"),
    "empty": (lambda path: os.truncate(path, 0), "not a file of KV blocks"),
    "flipped": (flip, "checksum is wrong"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "does not hold"),
    "other header": (lambda path: write_kv_file(path, b"HEADER", bytes(BYTES)), "other tokens"),
    "other size": (lambda path: write_kv_file(path, HEADER, bytes(BYTES - 4)), "does not hold"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_file_that_is_not_what_it_should_be_is_a_miss_and_is_deleted(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path)
    fill(folder, 1, 2)
    path = folder.path / f"{NAMES[1]}.kv"
    damage(path)
    with pytest.raises(BadKVFile, match=message):
        folder.read(NAMES[1], HEADER, memoryview(bytearray(BYTES)))
    assert not os.path.lexists(path) or path.is_dir()
    assert served(folder, 2) == 2


# ---- the thread


def test_every_read_and_write_is_done_and_answered_once_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reads = make_folder(tmp_path), []
    read, thread = folder.read, FileThread(folder)
    monkeypatch.setattr(folder, "read", lambda name, *args: (reads.append(name), read(name, *args)))
    for number in range(20):
        thread.write(NAMES[number], HEADER, lambda n=number: torch.full((BYTES,), n, dtype=torch.uint8), waits=True)
        thread.read(NAMES[number], HEADER)
        thread.read(NAMES[number], HEADER)  # it is being read already
        thread.delete(NAMES[number])
    assert thread.wait_until_idle()
    found = thread.finished(0.0)
    assert [(each.answer.kind, each.answer.name) for each in found] == [
        (kind, name) for name in NAMES[:20] for kind in ("written", "read")
    ]
    for number, each in enumerate(found[1::2]):
        assert each.content is not None
        assert each.content.tolist() == [number] * BYTES
    assert reads == NAMES[:20]
    assert thread.finished(5.0) == [], "there is nothing to wait for"
    thread.read(NAMES[0], HEADER)
    assert thread.wait_until_idle()
    [done] = thread.finished(0.0)
    assert (done.answer[:2], done.content) == (("read", NAMES[0]), None)
    assert done.answer.problem
    thread.close()
    assert not make_folder(tmp_path).names


def test_a_full_disk_is_one_line_and_writes_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_folder(tmp_path)
    thread = FileThread(folder)

    def fail(*_: object) -> list[str]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "write", fail)
    with caplog.at_level(logging.WARNING, logger="nanoengine"):
        for number in range(10):
            thread.write(NAMES[number], HEADER, lambda: torch.zeros(BYTES, dtype=torch.uint8), waits=True)
        thread.wait_until_idle()
    assert len([record for record in caplog.records if "No space" in record.getMessage()]) == 1
    assert all(done.answer.problem for done in thread.finished(0.0))
    thread.close()


def test_a_read_that_never_returns_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_folder(tmp_path)
    fill(folder, 1, 2)
    thread, returns = FileThread(folder, limit=0.2), threading.Event()
    read = folder.read
    monkeypatch.setattr(folder, "read", lambda *args: returns.wait(30) and read(*args))
    start = time.monotonic()
    thread.read(NAMES[1], HEADER)
    thread.read(NAMES[2], HEADER)
    done = []
    while len(done) < 2:
        done += thread.finished(0.01)
    assert all("no answer" in (each.answer.problem or "") for each in done)
    thread.read(NAMES[2], HEADER)
    thread.write(NAMES[3], HEADER, lambda: torch.zeros(BYTES, dtype=torch.uint8), waits=True)
    assert [each.answer.problem for each in thread.finished(1.0)] == ["the folder does not answer", "refused"]
    assert not thread.wait_until_idle()
    assert thread._thread.daemon, "a process ends all the same"
    assert time.monotonic() - start < 5.0
    assert "it is not used until it does" in caplog.text
    returns.set()
    while not thread.wait_until_idle():
        time.sleep(0.01)
    assert thread.finished(0.0) == [], "late answers are not wanted"
    thread.read(NAMES[2], HEADER)
    [each] = thread.finished(5.0)
    assert each.content is not None
    thread.close()


# ---- a process that is killed

WRITER = """
import sys
from tests.features.kv_offload.test_files import *
thread = FileThread(make_folder(Path(sys.argv[1]), max_files=40))
thread.folder.seed()
for round in range(10**6):
    for number in range(40):
        thread.write(NAMES[number], HEADER, lambda: torch.full((BYTES,), number, dtype=torch.uint8), waits=True)
    if round == 0:
        thread.wait_until_idle()
    os.write(int(sys.argv[2]), b'x')
"""


def test_a_process_killed_while_it_writes_leaves_whole_files_and_damage_is_never_served(tmp_path: Path) -> None:
    rounds, done = os.pipe()
    child = begin(["-c", WRITER, str(tmp_path), str(done)], done)
    for _ in range(2):
        os.read(rounds, 1)
    child.kill()
    child.wait()
    os.close(rounds)
    os.close(done)
    folder = make_folder(tmp_path, max_files=40)
    seed = folder.seed()
    assert len(folder.names) == 40
    for number in range(40):
        path = folder.path / f"{NAMES[number]}.kv"
        if number % 3 == 1:
            os.truncate(path, (number * 37) % SIZE)
        elif number % 3 == 2:
            data = bytearray(path.read_bytes())
            data[(number * 53) % SIZE] ^= 1 << number % 8
            path.write_bytes(data)
    for number in range(40):
        assert served(folder, number) == (number if number % 3 == 0 else None)
    assert folder.seed() == seed
