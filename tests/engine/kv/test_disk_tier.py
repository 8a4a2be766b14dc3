from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from nanoengine.engine.kv.block_pool import Prefix
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.kv_file import write_kv_file

BYTES = 64  # K/V of one block


def make_tier(folder: Path, *, fingerprint: str = "model", max_files: int = 10) -> DiskTier:
    size = DiskTier(folder, fingerprint, BYTES, 1 << 30).size_of(prefix(1))
    return DiskTier(folder, fingerprint, BYTES, max_files * size)


def prefix(number: int, parent: Prefix | None = None) -> Prefix:
    return Prefix(bytes([number] * 16), parent, bytes([number] * 8))


def write(tier: DiskTier, *prefixes: Prefix, payload: bytes = bytes(BYTES)) -> list[Path]:
    """Add prefixes and write their files, as a batch does."""
    paths = []
    for each in prefixes:
        tier.make_room(tier.size_of(each))
        file = tier.add(each)
        assert file is not None
        write_kv_file(Path(file[0]), file[1], payload)
        paths.append(Path(file[0]))
        tier.commit()
    return paths


def has(tier: DiskTier, each: Prefix) -> bool:
    """Whether its file can be hit: by its owner, or because it is looked into and found sound."""
    owner = tier.files.get(each.hash.hex())
    if owner is None:
        return tier.find(each.hash, each.parent, each.token_bytes) is not None
    return owner.on_disk and owner.token_bytes == each.token_bytes


def test_the_folder_is_made_and_each_model_has_its_own(tmp_path: Path) -> None:
    one = make_tier(tmp_path / "a" / "b", fingerprint="one")
    other = make_tier(tmp_path / "a" / "b", fingerprint="other")
    write(one, prefix(1))
    assert has(one, prefix(1))
    assert not has(other, prefix(1))
    assert not has(make_tier(tmp_path / "a" / "b", fingerprint="other"), prefix(1))


def test_an_empty_folder_has_nothing(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    assert not has(tier, prefix(1))
    assert tier.files == {}


def test_what_one_process_wrote_another_finds(tmp_path: Path) -> None:
    parent = prefix(1)
    child = prefix(2, parent)
    write(make_tier(tmp_path), parent, child)
    tier = make_tier(tmp_path)
    assert has(tier, parent)
    assert has(tier, child)


@pytest.mark.parametrize("what", ["tokens", "parent", "no parent"])
def test_a_file_of_other_tokens_or_behind_another_parent_is_ignored_with_one_warning(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = prefix(2, prefix(1))
    write(make_tier(tmp_path), asked)
    tier = make_tier(tmp_path)
    parent = {"tokens": asked.parent, "parent": prefix(5), "no parent": None}[what]
    token_bytes = b"\3" * 8 if what == "tokens" else asked.token_bytes
    with caplog.at_level(logging.WARNING, "nanoengine"):
        assert tier.find(asked.hash, parent, token_bytes) is None
        assert tier.find(asked.hash, parent, token_bytes) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "other tokens" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "altered", "empty", "gone", "short payload"])
def test_a_damaged_file_is_ignored_with_one_warning_and_can_be_written_again(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    [path] = write(make_tier(tmp_path), prefix(1), payload=bytes(BYTES - (damage == "short payload")))
    content = path.read_bytes()
    tier = make_tier(tmp_path)
    if damage == "cut":
        path.write_bytes(content[:-9])
    elif damage == "altered":
        path.write_bytes(content[:-10] + b"?" + content[-9:])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "gone":
        path.unlink()
    with caplog.at_level(logging.WARNING, "nanoengine"):
        assert not has(tier, prefix(1))
        assert not has(tier, prefix(1))
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    write(tier, prefix(1))
    assert has(tier, prefix(1))


def test_a_file_that_a_crash_left_unfinished_is_not_seen(tmp_path: Path) -> None:
    [path] = write(make_tier(tmp_path), prefix(1))
    path.rename(path.with_name(f"{path.name}.123.tmp"))
    assert not has(make_tier(tmp_path), prefix(1))


@pytest.mark.parametrize("num_written", [2, 3, 7])
def test_the_oldest_files_make_room(num_written: int, tmp_path: Path) -> None:
    tier = make_tier(tmp_path, max_files=2)
    paths = write(tier, *map(prefix, range(num_written)))
    assert [path.exists() for path in paths] == [False] * (num_written - 2) + [True] * 2
    assert [has(tier, prefix(i)) for i in range(num_written)] == [path.exists() for path in paths]


def test_a_file_that_was_used_is_not_the_oldest(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, max_files=2)
    first, second, third = map(prefix, (1, 2, 3))
    write(tier, first, second)
    tier.use(first)
    tier.commit()
    assert tier.make_room(tier.size_of(prefix(1))) == [second]
    write(tier, third)
    assert [each.on_disk for each in (first, second, third)] == [True, False, True]


def test_files_that_the_batch_in_flight_needs_are_not_deleted(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, max_files=1)
    first = prefix(1)
    [path] = write(tier, first)
    tier.use(first)
    assert tier.make_room(tier.size_of(prefix(1))) == []
    assert tier.add(prefix(2)) is None
    assert path.exists()
    tier.commit()
    assert tier.make_room(tier.size_of(prefix(1))) == [first]
    assert not path.exists()
    assert tier.add(prefix(2)) is not None
    assert tier.make_room(tier.size_of(prefix(1))) == [], "the second is being written"
    assert tier.add(prefix(3)) is None


def test_without_room_for_a_single_block_nothing_is_written(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", BYTES, BYTES - 1)
    assert tier.make_room(tier.size_of(prefix(1))) == []
    assert tier.add(prefix(1)) is None


def test_a_later_process_goes_on_with_the_oldest(tmp_path: Path) -> None:
    paths = write(make_tier(tmp_path), prefix(1), prefix(2), prefix(3))
    for path, age in zip(paths, (30, 10, 20), strict=True):
        os.utime(path, (1e9 - age, 1e9 - age))
    write(make_tier(tmp_path, max_files=3), prefix(4))
    assert [path.exists() for path in paths] == [False, True, True]


def test_a_folder_that_holds_more_than_is_allowed_now_shrinks_with_the_next_file(tmp_path: Path) -> None:
    write(make_tier(tmp_path), *map(prefix, range(6)))
    tier = make_tier(tmp_path, max_files=2)
    write(tier, prefix(9))
    assert len(list(tier.folder.glob("*.kv"))) == 2


def test_what_a_failed_batch_was_to_write_is_forgotten_and_deleted(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    promised = prefix(1)
    file = tier.add(promised)
    assert file is not None
    assert promised.on_disk, "a later transfer of the same batch may read it"
    write_kv_file(Path(file[0]), file[1], b"half")
    assert tier.rollback() == [promised]
    assert not promised.on_disk
    assert tier.files == {}
    assert not Path(file[0]).exists()
    assert tier.rollback() == []


@pytest.mark.parametrize("lost", [True, False])
def test_what_a_failed_batch_was_to_read_is_looked_into_again(lost: bool, tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    read, other = prefix(1), prefix(2)
    [path, _] = write(tier, read, other)
    tier.use(read)
    if lost:
        path.unlink()
    assert tier.rollback() == [read]
    assert (read.on_disk, other.on_disk) == (False, True)
    assert has(tier, prefix(1)) is not lost


def test_a_disowned_file_is_nobodys_until_it_is_found_again(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    first = prefix(1)
    write(tier, first)
    assert tier.disown(first.hash) == [first]
    assert tier.disown(first.hash) == []
    assert tier.find(first.hash, None, first.token_bytes) is not None, "the file is there and sound"


def test_clear_deletes_the_files_of_this_model_only(tmp_path: Path) -> None:
    tier, other = make_tier(tmp_path), make_tier(tmp_path, fingerprint="other")
    [mine], [foreign] = write(tier, prefix(1)), write(other, prefix(1))
    tier.clear()
    assert not mine.exists()
    assert foreign.exists()
    assert not has(tier, prefix(1))
    write(tier, prefix(1))
    assert has(tier, prefix(1))


@pytest.mark.parametrize("restarted", [False, True])
def test_a_hash_collision_with_a_file_is_a_miss(restarted: bool, tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    one = prefix(1)
    write(tier, one)
    if restarted:
        tier = make_tier(tmp_path)
        assert has(tier, one)
    assert tier.find(one.hash, None, b"\7" * 8) is None
    assert tier.find(one.hash, prefix(5), one.token_bytes) is None
    other = Prefix(one.hash, None, b"\7" * 8)
    assert tier.add(other) is None
    assert not other.on_disk
