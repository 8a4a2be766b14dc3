from __future__ import annotations

import os
from pathlib import Path

import pytest

from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.kv_file import file_bytes, write_kv_file
from nanoengine.engine.kv.orders import PlanRecord
from nanoengine.engine.messages import Place, Tier

BYTES = 64  # K/V of one block
SOURCE = Place(Tier.HOST, 0)
HEADER = b"header"
SIZE = file_bytes(HEADER, BYTES)


def make_tier(folder: Path, *, fingerprint: str = "model", max_files: int = 10) -> DiskTier:
    return DiskTier(folder, fingerprint, BYTES, max_files * SIZE)


def name(number: int, parent: int | None = None, group: int = 0) -> str:
    return DiskTier.name(bytes([number] * 16), b"" if parent is None else bytes([parent] * 16), group)


def order(tier: DiskTier, *names: str, at_once: bool = True) -> PlanRecord:
    """A plan that is to write these files."""
    plan = PlanRecord()
    for each in names:
        tier.write(plan, each, HEADER, SOURCE, at_once=at_once)
        tier.check()
    return plan


def written(tier: DiskTier, *names: str) -> PlanRecord:
    """A plan that has written them, and deleted what it was to."""
    plan = order(tier, *names)
    for path in plan.deletes:
        Path(path).unlink()
    for each in plan.writes:
        write_kv_file(Path(each.path), each.header, bytes(BYTES))
        tier.answer_write(plan, tier.name_at(each.path) or "", None)
    tier.check()
    return plan


def readable(tier: DiskTier, *names: str) -> list[bool]:
    return [tier.can_read(each) for each in names]


def test_the_folder_is_made_and_each_model_has_its_own(tmp_path: Path) -> None:
    one = make_tier(tmp_path / "a" / "b", fingerprint="one")
    other = make_tier(tmp_path / "a" / "b", fingerprint="other")
    written(one, name(1))
    assert one.can_read(name(1))
    assert not other.can_read(name(1))
    assert not make_tier(tmp_path / "a" / "b", fingerprint="other").can_read(name(1))


def test_what_one_process_wrote_another_finds(tmp_path: Path) -> None:
    written(make_tier(tmp_path), name(1), name(2, 1))
    tier = make_tier(tmp_path)
    assert readable(tier, name(1), name(2, 1), name(2), name(2, 5)) == [True, True, False, False]
    tier.check()


def test_a_file_can_be_read_when_it_is_said_to_be_there_and_not_before(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    plan = order(tier, name(1))
    assert [each.path for each in plan.writes] == [tier.path(name(1))]
    assert not tier.can_read(name(1))
    assert not tier.write(plan, name(1), HEADER, SOURCE), "it is ordered already"
    tier.answer_write(plan, name(1), None)
    assert tier.can_read(name(1))


def test_a_file_that_could_not_be_written_is_forgotten_and_may_be_ordered_again(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    tier.answer_write(order(tier, name(1)), name(1), "no space left")
    assert tier.files == {}
    assert tier.num_bytes == 0
    assert len(order(tier, name(1)).writes) == 1


def test_paths_and_names_belong_together_and_other_paths_are_nobodys(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    assert tier.name_at(tier.path(name(3, 4))) == name(3, 4)
    assert tier.name_at("/somewhere/else.kv") is None
    assert tier.name_at(str(tmp_path / "model" / "x.tmp")) is None


def test_the_header_tells_models_tokens_parents_and_groups_apart(tmp_path: Path) -> None:
    one, other = make_tier(tmp_path), make_tier(tmp_path, fingerprint="other")
    facts = [
        (b"1", b"", b"a", 0),
        (b"2", b"", b"a", 0),
        (b"1", b"2", b"a", 0),
        (b"1", b"", b"b", 0),
        (b"1", b"", b"a", 1),
    ]
    headers = {tier.header(*fact) for tier in (one, other) for fact in facts}
    assert len(headers) == 2 * len(facts)
    assert {make_tier(tmp_path).header(*fact) for fact in facts} < headers


def test_each_group_has_a_file_of_its_own(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    names = [name(1, 2, group) for group in (0, 1, 10)]
    assert len(written(tier, *names[:2]).writes) == 2
    assert readable(tier, *names) == [True, True, False]
    assert readable(make_tier(tmp_path), *names) == [True, True, False]


def test_a_file_that_a_crash_left_unfinished_is_not_seen_and_deleted(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    [path] = [Path(each.path) for each in written(tier, name(1)).writes]
    path.rename(path.with_name(f"{path.name}.123.tmp"))
    assert not make_tier(tmp_path).can_read(name(1))
    assert os.listdir(tier.folder) == []


@pytest.mark.parametrize("num_written", [2, 3, 7])
def test_the_oldest_files_make_room_and_are_ordered_to_be_deleted(num_written: int, tmp_path: Path) -> None:
    tier = make_tier(tmp_path, max_files=2)
    names = [name(i) for i in range(num_written)]
    deletes = [path for each in names for path in written(tier, each).deletes]
    assert deletes == [tier.path(each) for each in names[:-2]]
    assert readable(tier, *names) == [False] * (num_written - 2) + [True] * 2


def test_the_tier_never_touches_the_folder_after_its_start(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, max_files=1)
    written(tier, name(1))
    for path in tier.folder.iterdir():
        path.unlink()
    tier.folder.rmdir()
    plan = order(tier, name(2))
    tier.clear(plan)
    tier.drop_behind(plan, [bytes([1] * 16)])


def test_a_file_that_was_used_is_not_the_oldest(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, max_files=2)
    written(tier, name(1))
    written(tier, name(2))
    tier.use(name(1))
    tier.use("no such file")
    written(tier, name(3))
    assert readable(tier, name(1), name(2), name(3)) == [True, False, True]


def test_a_file_that_is_being_written_is_not_deleted_to_make_room(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, max_files=1)
    order(tier, name(1))
    plan = order(tier, name(2))
    assert plan.writes == plan.deletes == []


def test_without_room_for_a_single_block_nothing_is_written(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", BYTES, SIZE - 1)
    assert order(tier, name(1)).writes == []


def test_what_comes_while_too_much_waits_to_be_written_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoengine.engine.kv.disk_tier.MAX_UNWRITTEN", 2 * BYTES)
    tier = make_tier(tmp_path)
    plan = order(tier, *map(name, range(5)))
    assert len(plan.writes) == 2
    tier.answer_write(plan, name(0), None)
    assert len(order(tier, name(7), name(8)).writes) == 1
    assert len(order(tier, name(8), name(9), at_once=False).writes) == 2


def test_a_later_process_goes_on_with_the_oldest(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    paths = [Path(each.path) for each in written(tier, name(1), name(2), name(3)).writes]
    for path, age in zip(paths, (30, 10, 20), strict=True):
        os.utime(path, (1e9 - age, 1e9 - age))
    assert order(make_tier(tmp_path, max_files=3), name(4)).deletes == [str(paths[0])]


def test_a_folder_that_holds_more_than_is_allowed_now_shrinks_at_once(tmp_path: Path) -> None:
    written(make_tier(tmp_path), *map(name, range(6)))
    tier = make_tier(tmp_path, max_files=2)
    tier.check()
    assert len(list(tier.folder.glob("*.kv"))) == 2


def test_a_file_dropped_before_anybody_was_told_of_it_is_not_written(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    plan = order(tier, name(1), name(2))
    tier.drop(plan, name(1))
    assert [each.path for each in plan.writes] == [tier.path(name(2))]
    assert plan.deletes == []
    assert tier.write(plan, name(1), HEADER, SOURCE)


def test_a_file_dropped_while_it_is_written_is_deleted_when_it_has_come(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    order(tier, name(1))
    plan = PlanRecord()
    tier.drop(plan, name(1))
    assert not tier.write(plan, name(1), HEADER, SOURCE), "its answer would be taken for that of another order"
    later = PlanRecord()
    tier.answer_write(later, name(1), None)
    assert plan.deletes == later.deletes == [tier.path(name(1))]
    assert tier.write(later, name(1), HEADER, SOURCE)


def test_what_a_failed_plan_was_to_write_is_forgotten_and_deleted_if_it_comes_after_all(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    spoilt, plan = order(tier, name(1)), PlanRecord()
    tier.rollback(plan, spoilt)
    tier.check()
    assert tier.files == {}
    assert not tier.write(plan, name(1), HEADER, SOURCE)
    tier.answer_write(plan, name(1), None)
    assert plan.deletes == [tier.path(name(1))]
    assert tier.write(plan, name(1), HEADER, SOURCE)


def test_what_a_failed_plan_was_to_delete_the_next_one_deletes(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    written(tier, name(1), name(2))
    spoilt, plan = PlanRecord(), PlanRecord()
    tier.drop(spoilt, name(1))
    tier.drop(spoilt, name(2))
    order(tier, name(2))
    tier.rollback(plan, spoilt)
    assert plan.deletes == [tier.path(name(1))], "the other one is there again"


def test_all_that_follows_from_some_blocks_is_dropped_with_them(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    written(tier, name(1), name(2, 1), name(3, 2), name(4, 3), name(5, 1), name(6), name(7, 6), name(9, 8))
    plan = PlanRecord()
    tier.drop_behind(plan, [bytes([2] * 16), bytes([8] * 16)])
    tier.check()
    assert set(tier.files) == {name(1), name(5, 1), name(6), name(7, 6)}
    assert sorted(plan.deletes) == sorted(tier.path(each) for each in (name(2, 1), name(3, 2), name(4, 3), name(9, 8)))


def test_what_follows_from_a_block_is_dropped_in_every_group(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    going = [name(2, 1, 0), name(2, 1, 1), name(3, 2, 1), name(4, 3, 0), name(4, 3, 1)]
    written(tier, *going, name(1, None, 1), name(5, 1, 0))
    plan = PlanRecord()
    tier.drop_behind(plan, [bytes([2] * 16)])
    tier.check()
    assert set(tier.files) == {name(1, None, 1), name(5, 1, 0)}
    assert sorted(plan.deletes) == sorted(map(tier.path, going))


def test_clear_drops_the_files_of_this_model_only(tmp_path: Path) -> None:
    tier, other = make_tier(tmp_path), make_tier(tmp_path, fingerprint="other")
    written(tier, name(1))
    written(other, name(1))
    plan = PlanRecord()
    tier.clear(plan)
    assert plan.deletes == [tier.path(name(1))]
    assert other.can_read(name(1))
    tier.check()
