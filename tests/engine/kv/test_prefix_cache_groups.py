"""What is found of each KV group, what is lost, what goes to lower tiers, and what falls with a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoengine.engine.kv.block_pool import NULL_BLOCK
from nanoengine.engine.kv.events import BlockRemoved, BlockStored
from nanoengine.engine.kv.groups import CHUNKED, KVSpec
from nanoengine.engine.messages import Tier
from tests.engine.kv.group_toys import PROMPT, SIX, begin, copies, lose, make, prefill, serve
from tests.engine.kv.toys import B, evict, make_sequence, moves, num_cached, settle, tell

# ---- hits


@pytest.mark.parametrize(
    ("lost", "hit"),
    [
        ({}, 4),
        ({1: [0]}, 4),  # behind four blocks, a window of 6 sees the last two
        ({1: [0, 1]}, 4),
        ({1: [3]}, 3),
        ({1: [2]}, 2),
        ({1: [0, 2]}, 0),  # behind two blocks it would see the first one
        ({1: [1, 2]}, 1),
        ({1: [0, 3]}, 3),
        ({1: [1, 3]}, 1),
        ({1: [0, 1, 2, 3]}, 0),
        ({0: [3]}, 3),
        ({0: [3], 1: [1]}, 1),
        ({0: [1], 1: [2]}, 1),
        ({0: [0]}, 0),
        ({0: [2], 1: [0, 3]}, 0),  # behind two blocks the window lacks the first
    ],
)
def test_a_hit_ends_where_every_group_has_what_the_next_token_sees(lost: dict[int, list[int]], hit: int) -> None:
    manager = make()
    owner = serve(manager, 0, PROMPT)
    assert [len(found) for group in (0, 1) for found in copies(manager, owner, group)] == [1] * 8
    for group, indices in lost.items():
        lose(manager, owner, group, *indices)
    expected = [copies(manager, owner, group) for group in (0, 1)]
    seq = begin(manager, 1, PROMPT)
    assert seq.num_cached_tokens == hit * B
    first = max(hit - 2, 0)
    assert seq.first_blocks == [0, first]
    assert [(block,) for block in seq.block_tables[0][:hit]] == expected[0][:hit]
    assert seq.block_tables[1][:first] == [NULL_BLOCK] * first
    assert [(block,) for block in seq.block_tables[1][first:hit]] == expected[1][first:hit]
    assert [group.num_hit_blocks for group in manager.stats.groups] == [hit, hit - first]
    assert manager.stats.num_hit_tokens == hit * B
    prefill(manager, seq)
    manager.check()


def test_what_sequences_have_forgotten_is_evicted_before_what_they_still_see() -> None:
    """So a hit outlives the beginnings of its windows; only they are said to be removed."""
    manager = make(num_blocks=24)
    owner = serve(manager, 0, PROMPT)
    num_forgotten = manager.stats.groups[1].num_forgotten_blocks
    assert num_forgotten == 2
    manager.drain_events()
    evict(manager, len(manager.pool.empty_blocks) + num_forgotten)
    assert manager.drain_events() == [BlockRemoved(hash, 1) for hash in owner.block_hashes[:2]]
    assert [group.num_evicted_blocks for group in manager.stats.groups] == [0, 2]
    assert manager.stats.num_evicted_blocks == 2
    assert copies(manager, owner, 1)[:2] == [(), ()]
    assert num_cached(manager, PROMPT) == 16


def test_each_group_tells_what_it_stores_and_the_index_outlives_what_it_loses() -> None:
    manager = make()
    owner = serve(manager, 0, PROMPT)
    events = manager.drain_events()
    assert all(isinstance(event, BlockStored) for event in events)
    told = [(event.hash, event.group) for event in events if isinstance(event, BlockStored)]
    assert told == [(hash, group) for hash in owner.block_hashes for group in (0, 1)]
    lose(manager, owner, 0, 0, 1, 2, 3)
    lose(manager, owner, 1, 0, 1, 2)
    assert len(manager.pool.index) == 4, "the window of the last block stands on all before it"
    assert manager.cached_blocks() == [
        BlockStored(owner.block_hashes[3], owner.block_hashes[2], owner.block_tokens[3], 1)
    ]
    lose(manager, owner, 1, 3)
    assert not manager.pool.index
    assert num_cached(manager, PROMPT) == 0


def test_a_running_sequence_publishes_behind_what_nobody_has_any_more() -> None:
    """A window's beginning is evicted while its owner runs; what that computes next is found by those who need it."""
    manager = make(SIX, num_blocks=12)
    seq = begin(manager, 0, [1] * 33)
    prefill(manager, seq)
    others = manager.pool.allocate(manager.pool.num_free)
    manager.pool.release(others)
    assert copies(manager, seq, 0)[:6] == [()] * 6
    for _ in range(4):
        tell(seq, 5)
        assert manager.allocate_slots(seq) is not None
        seq.num_computed_tokens += 1
    manager.free(seq)
    assert num_cached(manager, [1] * 33 + [5] * 4) == 36


# ---- lower tiers


def test_a_swap_saves_what_each_group_still_sees_and_loads_it_again() -> None:
    manager = make(host=8)
    seq = begin(manager, 0, PROMPT)
    prefill(manager, seq)
    manager.swap_out(seq)
    seq.num_computed_tokens = 0
    assert len(moves(settle(manager).transfers)) == 4 + 2
    evict(manager)
    settle(manager)
    assert manager.admit(seq) == 16
    assert [group.num_saved_blocks for group in manager.stats.groups] == [4, 4], (
        "those that it had forgotten when evicted"
    )
    assert [group.num_loaded_blocks for group in manager.stats.groups] == [4, 2]
    assert manager.stats.num_loaded_blocks == 6
    assert manager.stats.hits_by_tier[Tier.HOST] == 16
    targets = [transfer.target.where for transfer in settle(manager).transfers if transfer.target.tier is Tier.DEVICE]
    assert sorted(targets) == sorted(seq.block_tables[0][:4] + seq.block_tables[1][2:4])


def test_a_hit_may_be_in_the_pool_for_one_group_and_in_host_memory_for_another() -> None:
    manager = make(host=8)
    seq = begin(manager, 0, PROMPT)
    prefill(manager, seq)
    manager.swap_out(seq)
    settle(manager)
    lose(manager, seq, 1, 2, 3)
    again = begin(manager, 1, PROMPT)
    assert again.num_cached_tokens == 16
    assert [group.num_loaded_blocks for group in manager.stats.groups] == [0, 2]
    assert manager.stats.hits_by_tier == {Tier.DEVICE: 8, Tier.HOST: 8, Tier.DISK: 0}


def test_files_of_a_group_are_read_only_as_far_as_its_next_token_sees(tmp_path: Path) -> None:
    manager = make(host=20, disk=tmp_path)
    serve(manager, 0, PROMPT)
    manager.save_all()
    orders = settle(manager)
    assert len(orders.writes) == 8
    assert [group.num_written_files for group in manager.stats.groups] == [4, 4]
    for write in orders.writes:
        Path(write.path).touch()  # the index believes in names

    later = make(host=20, disk=tmp_path)
    seq = make_sequence(0, PROMPT)
    assert later.fetch(seq)
    assert len(settle(later).reads) == 6
    assert [group.num_read_files for group in later.stats.groups] == [4, 2]
    assert later.admit(seq) == 16
    assert later.stats.hits_by_tier[Tier.DISK] == 16
    assert seq.first_blocks == [0, 2]


def test_where_a_groups_file_is_missing_the_files_of_a_shorter_hit_are_read(tmp_path: Path) -> None:
    manager = make(host=20, disk=tmp_path)
    serve(manager, 0, PROMPT)
    manager.save_all()
    writes = settle(manager).writes
    hashes = make_sequence(1, PROMPT)
    assert manager.admit(hashes) == 16
    missing = f"{hashes.block_hashes[3].hex()}-{hashes.block_hashes[2].hex()}-1"
    for write in writes:
        if Path(write.path).stem != missing:
            Path(write.path).touch()
    later = make(host=20, disk=tmp_path)
    seq = make_sequence(0, PROMPT)
    assert later.fetch(seq)
    settle(later)
    assert [group.num_read_files for group in later.stats.groups] == [3, 2]
    assert later.admit(seq) == 12
    assert seq.first_blocks == [0, 1]


def test_a_hit_that_needs_nothing_and_has_nothing_does_not_stay_in_the_index(tmp_path: Path) -> None:
    """Behind two blocks begins a chunk, so the token there sees neither; the file of the third, which it was about, is bad."""
    specs = (KVSpec(CHUNKED, 8),)
    manager = make(*specs, host=8, disk=tmp_path)
    serve(manager, 0, PROMPT[:13])
    manager.save_all()
    for write in settle(manager).writes:
        Path(write.path).touch()
    later = make(*specs, host=8, disk=tmp_path)
    seq = make_sequence(0, PROMPT[:13])
    assert later.fetch(seq)
    assert later.stats.num_read_files == 1
    settle(later, "damaged")
    assert not later.is_fetching(seq)
    assert not later.pool.index
    assert later.admit(seq) == 0


# ---- failures


def test_who_has_given_back_what_was_never_written_falls_too() -> None:
    """It has computed from it; nothing that it holds now says so."""
    manager = make(SIX, most_new=12)
    first = begin(manager, 0, [1] * 9)
    manager.publish(first, 9, committed=False)
    first.num_computed_tokens = 9
    manager.take_orders()
    second = begin(manager, 1, [1] * 8 + [2] * 20)
    assert second.num_cached_tokens == 8
    manager.publish(second, 20, committed=False)
    second.num_computed_tokens = 20
    manager.take_orders()
    assert manager.allocate_slots(second, num_lookahead=1) is not None
    assert not set(first.block_tables[0]) & set(filter(None, second.block_tables[0]))
    innocent = begin(manager, 2, [3] * 9)
    assert manager.rollback([first], [first, second, innocent]) == [first, second]
    for seq in (first, second):
        manager.discard(seq)
    manager.check()
    assert num_cached(manager, [1] * 8 + [2] * 20) == 0


def test_who_has_given_back_what_was_written_goes_on() -> None:
    manager = make(SIX, most_new=12)
    first = begin(manager, 0, [1] * 9)
    prefill(manager, first)
    second = begin(manager, 1, [1] * 8 + [2] * 20)
    manager.publish(second, 20, committed=False)
    second.num_computed_tokens = 20
    manager.take_orders()
    assert manager.allocate_slots(second, num_lookahead=1) is not None
    manager.commit()
    manager.take_orders()
    assert manager.rollback([first], [first, second]) == [first]


def test_condemned_beginnings_are_found_in_no_group(tmp_path: Path) -> None:
    manager = make(host=20, disk=tmp_path)
    seq = begin(manager, 0, PROMPT)
    prefill(manager, seq)
    manager.save_all()
    writes = settle(manager).writes
    manager.condemn(seq)
    manager.check()
    assert not manager.pool.index
    assert sorted(settle(manager).deletes) == sorted(write.path for write in writes)
    assert len(writes) == 8
    assert num_cached(manager, PROMPT) == 0
