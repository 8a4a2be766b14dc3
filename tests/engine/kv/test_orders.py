"""What counts while plans are on their way, and what is taken back when one of them fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.messages import FileDone
from tests.engine.kv.toys import B, ToySequence, again, evict, make_sequence, moves, num_cached, run, start, step, tell


def fail(manager: BlockManager, failed: list[ToySequence], running: list[ToySequence]) -> list[ToySequence]:
    """The oldest plan fails; who must fail with it is discarded."""
    fallen = manager.rollback(failed, running)
    for seq in fallen:
        manager.discard(seq)
    manager.check()
    return fallen


def test_what_one_plan_computes_the_next_one_hits_before_either_is_done() -> None:
    manager = BlockManager(10, B)
    first = start(manager, 0, [1] * 9)
    manager.take_orders()
    second = start(manager, 1, [1] * 9)
    assert second.block_table[:2] == first.block_table[:2]
    manager.take_orders()
    manager.commit()
    manager.commit()
    manager.check()
    assert manager.pool.uncommitted == {}


def test_between_two_plans_only_whole_blocks_of_known_tokens_are_found() -> None:
    manager = BlockManager(10, B)
    seq = start(manager, 0, [1] * 7)
    manager.take_orders()
    seq.coming = [5]  # the eighth token
    assert manager.allocate_slots(seq) is not None
    seq.num_computed_tokens += 1
    manager.take_orders()
    assert num_cached(manager, [1] * 7 + [5, 5]) == B
    manager.commit()
    tell(seq, seq.coming.pop())
    seq.coming = [6]
    assert manager.allocate_slots(seq) is not None
    assert num_cached(manager, [1] * 7 + [5, 5]) == B, (
        "its second block is full, but the plan that fills it is on its way"
    )
    seq.num_computed_tokens += 1
    manager.take_orders()
    manager.commit()
    tell(seq, seq.coming.pop())
    manager.publish(seq, seq.num_written_tokens)
    assert num_cached(manager, [1] * 7 + [5, 5]) == 2 * B


def test_who_shares_what_a_failed_plan_was_to_write_fails_too() -> None:
    manager = BlockManager(12, B)
    first = start(manager, 0, [1] * 9)
    manager.take_orders()
    second = start(manager, 1, [1] * 8 + [2] * 5)
    manager.take_orders()
    third = start(manager, 2, [1] * 8 + [2] * 4 + [3])
    innocent = start(manager, 3, [4] * 5)
    assert fail(manager, [first], [first, second, third, innocent]) == [first, second, third]
    assert num_cached(manager, [1] * 9) == 0
    assert num_cached(manager, [4] * 5) == B
    manager.take_orders()
    manager.commit()
    manager.commit()
    assert num_cached(manager, [4] * 5) == B


def test_what_failed_sequences_promised_in_later_plans_is_taken_back_and_who_shares_that_fails() -> None:
    """The second chunk of a prompt is in a later plan, and only that is shared."""
    manager = BlockManager(12, B)
    first = make_sequence(0, [1] * 8)
    manager.admit(first)
    manager.publish(first, 2, committed=False)
    first.num_computed_tokens = 2
    manager.take_orders()
    manager.publish(first, 8, committed=False)
    first.num_computed_tokens = 8
    manager.take_orders()
    second = start(manager, 1, [1] * 9)
    assert second.num_cached_tokens == 8
    assert fail(manager, [first], [first, second]) == [first, second]
    manager.commit()
    assert num_cached(manager, [1] * 9) == 0


def test_what_innocents_promised_in_later_plans_stays() -> None:
    manager = BlockManager(12, B)
    first = start(manager, 0, [1] * 5)
    manager.take_orders()
    second = start(manager, 1, [2] * 5)
    manager.take_orders()
    assert fail(manager, [first], [first, second]) == [first]
    assert num_cached(manager, [2] * 5) == B
    manager.commit()
    assert num_cached(manager, [2] * 5) == B


def test_a_block_that_was_given_on_is_not_shared_with_who_promised_it_before() -> None:
    """Its old owner was aborted; what the plan in flight writes there, the new owner writes over."""
    manager = BlockManager(3, B)
    first = start(manager, 0, [1] * 9)
    manager.take_orders()
    manager.free(first)
    second = start(manager, 1, [2] * 9)
    assert set(second.block_table) == {1, 2, 3}
    manager.take_orders()
    assert fail(manager, [], [second]) == []
    manager.commit()
    assert num_cached(manager, [1] * 9) is None
    manager.free(second)
    assert num_cached(manager, [2] * 9) == 8
    assert num_cached(manager, [1] * 9) == 0


def test_what_follows_from_a_failed_plan_is_forgotten_though_its_owner_has_gone() -> None:
    manager = BlockManager(12, B)
    first = start(manager, 0, [1] * 5)
    manager.take_orders()
    second = start(manager, 1, [1] * 4 + [2] * 5)
    manager.take_orders()
    manager.free(second)  # aborted, before the first plan fails
    assert fail(manager, [first], [first]) == [first]
    manager.commit()
    manager.check()
    assert not manager.pool.index


def test_what_a_sequence_that_has_ended_promised_behind_the_failed_plan_is_forgotten() -> None:
    """The failed plan was to compute only half a block of it, which nobody could hit."""
    manager = BlockManager(12, B)
    seq = make_sequence(0, [1] * 9)
    manager.admit(seq)
    seq.num_computed_tokens = 2
    manager.take_orders()
    manager.publish(seq, 9, committed=False)
    seq.num_computed_tokens = 9
    manager.take_orders()
    manager.free(seq)
    assert fail(manager, [seq], []) == [seq]
    manager.commit()
    assert not manager.pool.index


def test_forks_of_a_failed_parent_fail_even_if_they_share_half_a_block_only() -> None:
    manager = BlockManager(12, B)
    parent = make_sequence(0, [1] * 3)
    manager.admit(parent)
    parent.num_computed_tokens = 1
    manager.take_orders()
    parent.num_computed_tokens = 3
    child = make_sequence(1, [1] * 3)
    child.num_computed_tokens = 3
    manager.fork(parent, child)
    manager.take_orders()
    manager.free(parent)  # aborted in between
    assert fail(manager, [parent], [child]) == [parent, child]


def test_forks_of_a_parent_whose_prompt_was_committed_do_not_fail_with_it() -> None:
    manager = BlockManager(12, B)
    parent, child = start(manager, 0, [1] * 3), make_sequence(1, [1] * 3)
    child.num_computed_tokens = 3
    manager.fork(parent, child)
    step(manager)
    tell(parent, 5)
    assert manager.allocate_slots(parent) is not None
    manager.take_orders()
    assert fail(manager, [parent], [parent, child]) == [parent]


def test_nothing_is_published_behind_a_block_that_was_withdrawn() -> None:
    """It would look like the beginning of a prompt."""
    manager = BlockManager(12, B)
    first = start(manager, 0, [1] * 9)
    sharer = start(manager, 1, [1] * 8 + [2] * 3)
    step(manager)
    manager.collect_events = True
    manager.condemn(first)
    manager.drain_events()
    tell(sharer, 3, 3, 3)
    sharer.num_computed_tokens = sharer.num_tokens - 1
    assert manager.allocate_slots(sharer) is not None
    manager.free(sharer)
    manager.check()
    assert manager.drain_events() == []
    assert not manager.pool.index


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_copy_in_host_memory_is_a_hit_when_the_plan_that_makes_it_is_committed(depth: int) -> None:
    manager = BlockManager(4, B, host=HostTier(4))
    run(manager, 0, [1] * 9)
    evict(manager)
    manager.take_orders()
    for _ in range(depth - 1):
        assert num_cached(manager, [1] * 9) == 0
        manager.take_orders()
    manager.commit()
    assert num_cached(manager, [1] * 9) == 8
    for _ in range(depth - 1):
        manager.commit()
    manager.check()


def test_a_copy_that_a_failed_plan_was_to_make_is_never_a_hit() -> None:
    manager = BlockManager(4, B, host=HostTier(4))
    run(manager, 0, [1] * 9)
    evict(manager)
    manager.take_orders()
    manager.take_orders()
    assert fail(manager, [], []) == []
    assert num_cached(manager, [1] * 9) == 0
    manager.commit()
    assert num_cached(manager, [1] * 9) == 0
    assert manager.tiers.host is not None
    assert len(manager.tiers.host.free_slots) == 4


def test_what_a_failed_plan_was_to_copy_back_stays_in_host_memory() -> None:
    manager = BlockManager(4, B, host=HostTier(4))
    run(manager, 0, [1] * 9)
    evict(manager)
    step(manager)
    seq = start(manager, 1, [1] * 9)
    assert seq.num_cached_tokens == 8
    manager.take_orders()
    sharer = make_sequence(2, [1] * 5)
    assert manager.admit(sharer) == B
    assert fail(manager, [seq], [seq, sharer]) == [seq, sharer]
    again_seq = start(manager, 3, [1] * 9)
    assert again_seq.num_cached_tokens == 8
    assert len(moves(step(manager).transfers)) == 2


def test_a_slot_that_a_plan_in_flight_reads_is_not_given_on() -> None:
    """A plan later, host memory is full and its oldest entry is still being copied back."""
    manager = BlockManager(6, B, host=HostTier(2))
    run(manager, 0, [1] * 9)
    evict(manager)
    step(manager)
    seq = start(manager, 1, [1] * 9)
    read = {transfer.source.where for transfer in manager.take_orders().transfers}
    run_later = start(manager, 2, [3] * 5)
    manager.take_orders()
    manager.commit()
    manager.discard(seq)
    manager.commit()
    manager.free(run_later)
    assert read == {0, 1}
    evict(manager)
    assert {transfer.target.where for transfer in manager.take_orders().transfers} < read | {0}
    manager.check()


def test_a_swap_while_plans_are_in_flight_and_the_way_back(tmp_path: Path) -> None:
    del tmp_path
    manager = BlockManager(4, B, host=HostTier(4))
    seq = start(manager, 0, [1] * 9)
    manager.take_orders()
    manager.take_orders()
    manager.commit()
    manager.swap_out(seq)
    evict(manager)
    manager.take_orders()
    seq.num_computed_tokens = 0
    manager.commit()
    manager.commit()
    again(manager, seq)
    assert manager.stats.num_resumed_hit_tokens == 8
    manager.check()


# ---- K/V that may be wrong


def everything_saved(tmp_path: Path) -> tuple[BlockManager, ToySequence]:
    """A running sequence of two blocks, with copies in host memory and in files."""
    manager = BlockManager(8, B, host=HostTier(8), disk=DiskTier(tmp_path, "model", 8, 1 << 20))
    seq = start(manager, 0, [1] * 9)
    step(manager)
    manager.swap_out(seq)
    seq.num_computed_tokens = 0
    step(manager)
    manager.save_all()
    orders = manager.take_orders()
    manager.commit([FileDone(write.path) for write in orders.writes])
    again(manager, seq)
    step(manager)
    return manager, seq


def test_condemned_blocks_are_found_in_no_tier_and_their_files_are_deleted(tmp_path: Path) -> None:
    manager, seq = everything_saved(tmp_path)
    manager.condemn(seq)
    manager.check()
    asked = make_sequence(1, [1] * 9)
    assert not manager.fetch(asked)
    assert manager.admit(asked) == 0
    assert len(step(manager).deletes) == 2
    assert seq.block_table == []


def test_what_others_computed_behind_condemned_blocks_is_condemned_with_them(tmp_path: Path) -> None:
    manager, seq = everything_saved(tmp_path)
    child = run(manager, 1, [1] * 8 + [2] * 5)
    assert child.num_cached_tokens == 8
    manager.save_all()
    orders = manager.take_orders()
    manager.commit([FileDone(write.path) for write in orders.writes])
    manager.condemn(seq)
    assert not manager.pool.index
    evict(manager)
    assert num_cached(manager, [1] * 8 + [2] * 5) == 0
    orders = step(manager)
    assert len(orders.deletes) == 3
    assert orders.writes == []


def test_a_sequence_is_condemned_after_it_was_preempted_or_has_ended() -> None:
    manager = BlockManager(8, B)
    seq = start(manager, 0, [1] * 9)
    manager.take_orders()
    manager.free(seq)
    manager.commit()
    assert num_cached(manager, [1] * 9) == 8
    manager.condemn(seq)
    assert num_cached(manager, [1] * 9) == 0


def test_a_condemned_file_that_is_still_being_written_is_deleted_when_it_has_come(tmp_path: Path) -> None:
    manager = BlockManager(8, B, host=HostTier(8), disk=DiskTier(tmp_path, "model", 8, 1 << 20))
    seq = start(manager, 0, [1] * 5)
    step(manager)
    manager.save_all()
    [write] = step(manager).writes
    manager.condemn(seq)
    assert step(manager).deletes == [write.path]
    manager.take_orders()
    manager.commit([FileDone(write.path)])
    assert step(manager).deletes == [write.path]
    assert not manager.fetch(make_sequence(1, [1] * 5))


def test_a_host_slot_of_a_failed_plan_is_nobodys_before_the_next_plan_is_over() -> None:
    """The device may still be copying into it, and files are read there beside the device's work."""
    manager = BlockManager(4, B, host=HostTier(2))
    run(manager, 0, [1] * 9)
    evict(manager)
    manager.take_orders()
    assert fail(manager, [], []) == []
    assert manager.tiers.host is not None
    assert manager.tiers.host.free_slots == []
    manager.take_orders()
    manager.commit()
    assert sorted(manager.tiers.host.free_slots) == [0, 1]
    manager.check()
