"""Sequences that wait for files."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.messages import FileDone, FileRead, Tier
from tests.engine.kv.toys import B, ToySequence, again, evict, make_sequence, moves, run, settle, start, step

PROMPT = [1] * (3 * B + 1)


def with_files(tmp_path: Path, *prompts: list[int], host: int = 8, num_blocks: int = 12) -> BlockManager:
    """A manager whose files hold these prompts, and nothing else does."""
    before = BlockManager(50, B, host=HostTier(1), disk=DiskTier(tmp_path, "model", 8, 1 << 20), hash_seed=3)
    for seq_id, prompt in enumerate(prompts):
        run(before, 1000 + seq_id, prompt)
    before.save_all()
    for write in step(before).writes:
        Path(write.path).touch()  # the index believes in names
    disk = DiskTier(tmp_path, "model", 8, 1 << 20)
    return BlockManager(num_blocks, B, host=HostTier(host), disk=disk, hash_seed=3)


def fetching(manager: BlockManager, seq_id: int, prompt: list[int]) -> ToySequence:
    seq = make_sequence(seq_id, prompt)
    assert manager.fetch(seq)
    assert manager.is_fetching(seq)
    return seq


def answers(reads: list[FileRead], *bad: int) -> list[FileDone]:
    return [FileDone(read.path, "damaged" if i in bad else None) for i, read in enumerate(reads)]


def land(manager: BlockManager, files: list[FileDone]) -> None:
    manager.take_orders()
    manager.commit(files)
    manager.check()


def test_a_sequence_waits_for_its_files_and_is_admitted_with_them(tmp_path: Path) -> None:
    manager = with_files(tmp_path, PROMPT)
    seq = fetching(manager, 0, PROMPT)
    reads = step(manager).reads
    assert len({read.slot for read in reads}) == len(reads) == 3
    land(manager, answers(reads[:2]))
    assert manager.is_fetching(seq)
    assert manager.fetch(seq), "it has to wait still"
    land(manager, answers(reads[2:]))
    assert not manager.is_fetching(seq)
    assert not manager.fetch(seq)
    again(manager, seq)
    assert seq.num_cached_tokens == 12
    loads = step(manager).transfers
    assert [load.source.where for load in loads] == [read.slot for read in reads]
    assert manager.stats.hits_by_tier[Tier.DISK] == 12


def test_nothing_is_read_for_who_finds_no_file_or_must_compute_all(tmp_path: Path) -> None:
    manager = with_files(tmp_path, PROMPT)
    assert not manager.fetch(make_sequence(0, [2] * 9))
    assert not manager.fetch(make_sequence(1, PROMPT, reads_cache=False))
    assert not manager.fetch(make_sequence(2, [1] * B)), "its last token is computed in any case"
    assert step(manager).reads == []
    assert not BlockManager(4, B).fetch(make_sequence(3, PROMPT))


def test_only_what_continues_the_pool_and_host_memory_is_read(tmp_path: Path) -> None:
    manager = with_files(tmp_path, PROMPT)
    run(manager, 0, PROMPT[: 2 * B + 1])
    seq = fetching(manager, 1, PROMPT)
    [read] = settle(manager).reads
    assert seq.block_hashes[2].hex() in read.path
    again(manager, seq)
    assert seq.num_cached_tokens == 12
    assert manager.stats.hits_by_tier == {Tier.DEVICE: 8, Tier.HOST: 0, Tier.DISK: 4}


def test_two_sequences_that_want_the_same_files_share_the_reads(tmp_path: Path) -> None:
    manager = with_files(tmp_path, PROMPT)
    first, second = fetching(manager, 0, PROMPT), fetching(manager, 1, PROMPT[: 2 * B + 1])
    reads = step(manager).reads
    assert len(reads) == 3
    land(manager, answers(reads[:2]))
    assert not manager.is_fetching(second)
    again(manager, second)
    assert second.num_cached_tokens == 8
    land(manager, answers(reads[2:]))
    again(manager, first)
    assert first.num_cached_tokens == 12


def test_there_are_only_as_many_reads_as_slots_and_the_rest_is_computed(tmp_path: Path) -> None:
    manager = with_files(tmp_path, PROMPT, [2] * 9, host=2)
    seq = fetching(manager, 0, PROMPT)
    assert not manager.fetch(make_sequence(1, [2] * 9)), "no slot is left"
    assert len(settle(manager).reads) == 2
    again(manager, seq)
    assert seq.num_cached_tokens == 8


def test_a_slot_that_plans_in_flight_touch_is_not_read_into(tmp_path: Path) -> None:
    """The thread of files knows nothing of the order of the steps."""
    manager = with_files(tmp_path, PROMPT, host=2)
    run(manager, 0, [3] * 9)
    evict(manager)
    saved = manager.take_orders().transfers
    assert len(saved) == 2
    assert not manager.fetch(make_sequence(1, PROMPT))
    manager.commit()
    seq = start(manager, 2, [3] * 5)
    assert moves(manager.take_orders().transfers) == [(Tier.HOST, Tier.DEVICE)]
    fetching(manager, 3, PROMPT)
    [read] = manager.take_orders().reads
    manager.commit()
    manager.commit()
    manager.discard(seq)
    manager.check()
    assert read.slot == saved[0].target.where, "that of the second block, which nobody reads"


@pytest.mark.parametrize(("bad", "num_cached"), [(0, 0), (1, 4), (2, 8)])
def test_a_read_that_fails_is_a_miss_and_what_follows_it_gives_its_slot_back(
    bad: int, num_cached: int, tmp_path: Path
) -> None:
    manager = with_files(tmp_path, PROMPT)
    seq = fetching(manager, 0, PROMPT)
    reads = step(manager).reads
    land(manager, answers(reads, bad))
    assert not manager.is_fetching(seq)
    assert step(manager).deletes == [reads[bad].path], "it is worth nothing"
    again(manager, seq)
    assert seq.num_cached_tokens == num_cached
    manager.free(seq)
    step(manager)
    host = manager.tiers.host
    assert host is not None
    assert len(host.free_slots) == host.num_slots - num_cached // B
    assert manager.stats.num_bad_files == 1


def test_unknown_paths_and_answers_that_come_twice_are_ignored(tmp_path: Path) -> None:
    manager = with_files(tmp_path, PROMPT)
    seq = fetching(manager, 0, PROMPT)
    reads = step(manager).reads
    land(
        manager,
        [FileDone("/somewhere/else"), FileDone(reads[0].path + "x", "bad"), *answers(reads), *answers(reads, 0)],
    )
    again(manager, seq)
    assert seq.num_cached_tokens == 12
    BlockManager(4, B).take_orders()
    plain = BlockManager(4, B)
    land(plain, answers(reads))


def test_who_ends_while_it_waits_gives_its_slots_back_when_they_have_come(tmp_path: Path) -> None:
    manager = with_files(tmp_path, PROMPT)
    seq = fetching(manager, 0, PROMPT)
    reads = step(manager).reads
    manager.cancel_fetch(seq)
    manager.check()
    assert not manager.is_fetching(seq)
    host = manager.tiers.host
    assert host is not None
    assert len(host.free_slots) == 5, "somebody still reads into the others"
    land(manager, answers(reads))
    assert len(host.free_slots) == 8
    assert not manager.pool.index


def test_who_comes_while_the_reads_of_one_that_ended_go_on_takes_them_over(tmp_path: Path) -> None:
    manager = with_files(tmp_path, PROMPT)
    manager.cancel_fetch(fetching(manager, 0, PROMPT))
    seq = fetching(manager, 1, PROMPT)
    reads = step(manager).reads
    assert len(reads) == 3
    land(manager, answers(reads))
    again(manager, seq)
    assert seq.num_cached_tokens == 12


def test_what_a_sequence_has_fetched_waits_for_it(tmp_path: Path) -> None:
    """Host memory is small, and the pool is full for a while."""
    manager = with_files(tmp_path, PROMPT, host=3, num_blocks=6)
    seq = fetching(manager, 0, PROMPT)
    settle(manager)
    for number in range(5):
        run(manager, 10 + number, [number + 5] * 21)
    again(manager, seq)
    assert seq.num_cached_tokens == 12
    step(manager)
    assert manager.tiers.host is not None
    assert not any(manager.tiers.host.pins)


def test_a_beginning_that_was_computed_meanwhile_is_the_parent_of_what_came(tmp_path: Path) -> None:
    """Prefixes are compared by their parents' identity."""
    manager = with_files(tmp_path, PROMPT)
    seq = fetching(manager, 0, PROMPT)
    reads = step(manager).reads
    other = make_sequence(1, PROMPT[: B + 1])
    assert manager.admit(other) == 0
    manager.publish(other, B + 1, committed=False)
    step(manager)
    land(manager, answers(reads))
    again(manager, seq)
    assert seq.num_cached_tokens == 12
    assert seq.block_table[0] == other.block_table[0]
    assert manager.tiers.host is not None
    assert len(manager.tiers.host.free_slots) == 6


def test_reads_of_a_failed_plan_are_ordered_again(tmp_path: Path) -> None:
    manager = with_files(tmp_path, PROMPT)
    seq = fetching(manager, 0, PROMPT)
    reads = manager.take_orders().reads
    manager.take_orders()
    assert manager.rollback([], []) == []
    manager.check()
    assert manager.is_fetching(seq)
    again_reads = manager.take_orders().reads
    assert again_reads == reads
    manager.commit()
    manager.commit(answers(reads))
    again(manager, seq)
    assert seq.num_cached_tokens == 12


def test_a_read_that_was_begun_though_its_plan_failed_is_not_ordered_again(tmp_path: Path) -> None:
    manager = with_files(tmp_path, PROMPT)
    fetching(manager, 0, PROMPT)
    reads = manager.take_orders().reads
    manager.take_orders()
    manager.rollback([], [])
    manager.commit(answers(reads[:2]))
    assert manager.take_orders().reads == reads[2:]


@pytest.mark.parametrize("reset", [True, False])
def test_what_is_being_read_when_it_is_condemned_or_forgotten_is_not_used(reset: bool, tmp_path: Path) -> None:
    manager = with_files(tmp_path, PROMPT)
    seq = fetching(manager, 0, PROMPT)
    reads = step(manager).reads
    land(manager, answers(reads[:1]))
    if reset:
        assert manager.reset_prefix_cache()
    else:
        twin = make_sequence(1, PROMPT)
        twin.block_hashes = list(seq.block_hashes)
        manager.condemn(twin)
    manager.check()
    late = make_sequence(2, PROMPT)
    assert not manager.fetch(late), "the reads that are under way are not shared any more"
    land(manager, answers(reads[1:]))
    assert not manager.is_fetching(seq)
    assert manager.admit(seq) == 0
    manager.check()


def test_a_file_is_asked_for_with_the_tokens_of_who_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts whose hashes collide do not share a read."""
    manager = with_files(tmp_path, [1] * 5)
    first = fetching(manager, 0, [1] * 5)
    monkeypatch.setattr(manager.pool, "hash_block", lambda *_: first.block_hashes[0])
    assert not manager.fetch(make_sequence(1, [2] * 5))
    [read] = step(manager).reads
    assert (b"01000000" * B) in read.header
