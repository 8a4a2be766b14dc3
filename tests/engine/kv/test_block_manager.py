from __future__ import annotations

import pytest

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.block_pool import NULL_BLOCK
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.messages import Entries
from tests.engine.kv.toys import (
    B,
    ToySequence,
    evict,
    free_order,
    make_sequence,
    num_cached,
    run,
    snapshot,
    start,
    step,
    tell,
)


def compute(manager: BlockManager, seq: ToySequence, count: int | None = None) -> list[int]:
    """Do what a step does for one sequence; returns the blocks that it published."""
    count = seq.num_uncomputed_tokens if count is None else count
    seq.num_computed_tokens += count
    before = seq.num_published
    manager.publish(seq, seq.num_computed_tokens)
    return seq.block_table[before : seq.num_published]


def run_prompt(manager: BlockManager, seq_id: int, prompt: list[int]) -> ToySequence:
    """Admit a new sequence and compute its prompt."""
    seq = make_sequence(seq_id, prompt)
    cached = manager.admit(seq)
    assert cached is not None
    seq.num_computed_tokens = seq.num_cached_tokens = cached
    compute(manager, seq)
    return seq


def generate(manager: BlockManager, seq: ToySequence, tokens: list[int]) -> None:
    """Append tokens one by one and compute each, as decode steps do."""
    for token in tokens:
        tell(seq, token)
        assert manager.allocate_slots(seq) is not None
        compute(manager, seq)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (B - 1, 1), (B, 1), (B + 1, 2), (2 * B, 2)])
def test_blocks_needed_come_from_lengths(num_tokens: int, num_blocks: int) -> None:
    assert BlockManager(1, B).blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize(
    ("length", "table"), [(1, [1]), (B - 1, [1]), (B, [1, 2]), (B + 1, [1, 2]), (2 * B, [1, 2, 3])]
)
def test_admission_gives_room_for_the_prompt_and_one_token_more(length: int, table: list[int]) -> None:
    manager = BlockManager(10, B)
    seq = make_sequence(0, list(range(length)))
    assert manager.admit(seq) == 0
    assert seq.block_table == table
    assert manager.allocate_slots(seq) == []
    assert seq.block_table == table


def test_a_hit_shares_the_block_of_a_running_owner() -> None:
    manager = BlockManager(10, B)
    first = run_prompt(manager, 0, [1, 2, 3, 4, 5])
    second = run_prompt(manager, 1, [1, 2, 3, 4, 6])
    assert second.num_cached_tokens == B
    assert second.block_table == [first.block_table[0], 3]
    assert manager.pool.ref_counts[first.block_table[0]] == 2
    manager.free(first)
    assert manager.pool.ref_counts[second.block_table[0]] == 1


def test_a_hit_revives_the_block_of_a_finished_owner() -> None:
    manager = BlockManager(4, B)
    manager.free(run_prompt(manager, 0, [1, 2, 3, 4, 5]))
    assert free_order(manager.pool) == [2, 3, 4, 1]
    second = run_prompt(manager, 1, [1, 2, 3, 4, 6])
    assert second.block_table == [1, 2]
    assert free_order(manager.pool) == [3, 4]


def test_the_free_list_holds_unused_blocks_then_tails_then_heads() -> None:
    """So that eviction takes what is worth least first, and a shared prefix last."""
    manager = BlockManager(7, B)
    first = run_prompt(manager, 0, [1, 2, 3, 4, 5, 5, 5, 5, 5])
    second = run_prompt(manager, 1, [1, 2, 3, 4, 6, 6, 6, 6, 6])
    assert (first.block_table, second.block_table) == ([1, 2, 3], [1, 4, 5])
    manager.free(first)
    assert free_order(manager.pool) == [3, 6, 7, 2]
    manager.free(second)
    assert free_order(manager.pool) == [5, 3, 6, 7, 2, 4, 1]


@pytest.mark.parametrize("num_evicted", [0, 1, 2, 3])
def test_eviction_shortens_a_cached_prefix_from_its_tail(num_evicted: int) -> None:
    manager = BlockManager(4, B)
    prompt = list(range(3 * B + 1))
    manager.free(run_prompt(manager, 0, prompt))
    evict(manager, 1 + num_evicted)  # the first one held the partial block
    assert num_cached(manager, prompt) == (3 - num_evicted) * B


def test_a_hit_is_not_evicted_by_the_allocation_that_follows_it() -> None:
    manager = BlockManager(3, B)
    manager.free(run_prompt(manager, 0, [1] * B + [2] * (B - 1)))
    other = run_prompt(manager, 1, [3] * (2 * B - 1))
    manager.free(other)
    assert free_order(manager.pool)[1] == 1, "the cached block is the first to be evicted"
    seq = run_prompt(manager, 2, [1] * B + [4] * (2 * B - 1))
    assert seq.num_cached_tokens == B
    assert seq.block_table[0] == 1
    manager.pool.check()


def test_empty_blocks_are_used_before_cached_ones() -> None:
    """Four prompts of a block and a token in a pool of four blocks: what their ends leave empty is room for the next."""
    manager = BlockManager(4, 16)
    prompts = {name: [number] * 17 for number, name in enumerate("ABC")}
    assert [run(manager, i, prompts[name]).num_cached_tokens for i, name in enumerate("ABCA")] == [0, 0, 0, 16]


def test_an_admission_that_fails_changes_nothing() -> None:
    manager = BlockManager(4, B)
    manager.free(run_prompt(manager, 0, [1] * B + [2]))
    run_prompt(manager, 1, [3] * (B + 1))
    # Two blocks are free; the hit must be revived and two more are needed.
    seq = make_sequence(2, [1] * B + [4] * B)
    before = snapshot(manager.pool), manager.stats.num_queried_tokens, manager.stats.num_hit_tokens
    assert manager.admit(seq) is None
    assert (snapshot(manager.pool), manager.stats.num_queried_tokens, manager.stats.num_hit_tokens) == before
    assert seq.block_table == []
    assert seq.num_cached_tokens is None


def test_a_full_pool_is_not_searched_for_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting sequence asks before every step: hashing a long prompt each time would cost more than the step."""
    manager = BlockManager(4, B)
    running = run_prompt(manager, 0, [1] * (3 * B))
    looked_up = []
    find = manager.pool.find
    monkeypatch.setattr(manager.pool, "find", lambda *args: (looked_up.append(args), find(*args))[1])
    assert manager.pool.num_free == 0
    waiting = make_sequence(1, [1] * (3 * B))
    assert manager.admit(waiting) is None
    assert looked_up == []
    manager.free(running)
    assert manager.admit(waiting) == 2 * B
    assert looked_up


def test_a_growth_that_fails_changes_nothing() -> None:
    manager = BlockManager(2, B)
    first = run_prompt(manager, 0, [1, 2])
    run_prompt(manager, 1, [3])
    tell(first, 1, 1, 1)
    before = snapshot(manager.pool)
    assert manager.allocate_slots(first) is None
    assert snapshot(manager.pool) == before
    assert first.block_table == [1]


def test_a_fork_of_a_prompt_that_was_begun_gets_room_for_all_its_tokens() -> None:
    """It shares what is computed, here whole blocks; what it has to compute itself may be more than one."""
    manager = BlockManager(10, B)
    parent, child = make_sequence(0, list(range(3 * B))), make_sequence(1, list(range(3 * B)))
    manager.admit(parent)
    compute(manager, parent, B)
    child.num_computed_tokens = B
    manager.fork(parent, child)
    assert manager.allocate_slots(child) is not None
    assert child.num_slots == 3 * B
    assert len(child.block_table) == 3


def test_two_admissions_on_a_full_pool_do_not_rob_each_other() -> None:
    """Finding a prefix and pinning it is one call: the next admission cannot evict what this one counts on."""
    manager = BlockManager(3, B)
    manager.free(run_prompt(manager, 0, [1] * (B + 1)))
    first, second = make_sequence(1, [1] * (B + 1)), make_sequence(2, [2] * (B + 1))
    assert manager.admit(first) == B
    before = list(manager.pool.ref_counts)
    assert manager.admit(second) is None
    assert manager.pool.ref_counts == before
    assert manager.pool.contents[first.block_table[0]] is not None


def test_admission_takes_the_very_last_block() -> None:
    manager = BlockManager(2, B)
    assert manager.admit(make_sequence(0, [1] * B)) == 0
    assert manager.pool.num_free == 0


def test_a_growth_says_what_is_new_and_what_was_copied() -> None:
    manager = BlockManager(10, B)
    parent, child = run_prompt(manager, 0, [1] * 7), make_sequence(1, [1] * 7)
    child.num_computed_tokens = 7
    manager.fork(parent, child)
    shared = parent.block_table[1]
    tell(parent, 5)
    changes = manager.allocate_slots(parent, num_lookahead=B)
    own, new = parent.block_table[1:]
    assert changes == [Entries(0, 0, 1, [own]), Entries(0, 0, 2, [new])]
    assert child.block_table[1] == shared != own
    assert step(manager).transfers[0].target.where == own


def test_a_device_hit_behind_one_in_host_memory_on_a_full_pool() -> None:
    """The block that is copied back takes the last free one; the hit behind it must not be that."""
    manager = BlockManager(3, B, host=HostTier(4))
    prompt = [1] * (2 * B + 1)
    seq = start(manager, 0, prompt)
    step(manager)
    head, tail, _ = seq.block_table
    manager.swap_out(seq)
    step(manager)
    keeper = make_sequence(1, prompt)
    assert manager.admit(keeper) == 2 * B
    manager.pool.release([head])  # as if only the tail were in use
    keeper.block_table.remove(head)
    manager.pool.withdraw(head)
    manager.discard(keeper)
    step(manager)
    hit = make_sequence(2, prompt)
    assert manager.admit(hit) == 2 * B
    assert hit.block_table[1] == tail
    assert manager.pool.num_free == 0
    [load] = step(manager).transfers
    assert load.target.where == hit.block_table[0]


def test_freeing_twice_returns_nothing_twice() -> None:
    manager = BlockManager(4, B)
    seq = run_prompt(manager, 0, [1] * 5)
    manager.free(seq)
    manager.free(seq)
    assert manager.pool.num_free == 4
    manager.pool.check()


def test_blocks_that_may_hold_no_number_are_wiped_before_they_are_used_again() -> None:
    """Those that can still be found, or that others hold, are sound, and stay as they are."""
    manager = BlockManager(6, B)
    sound = run_prompt(manager, 0, [1] * (B + 1))
    sharer = make_sequence(1, [1] * B + [2] * (B + 1))
    assert manager.admit(sharer) == B
    spoilt = [block for block in sharer.block_table if block not in sound.block_table]
    manager.take_orders()
    manager.rollback([sharer], [sound, sharer])
    manager.discard(sharer, wipe=True)
    assert not manager.has_orders, "nobody uses them yet"
    next_owner = make_sequence(2, [3] * (4 * B - 1))
    assert manager.admit(next_owner) == 0
    wiped = [
        transfer.target.where for transfer in manager.take_orders().transfers if transfer.source.where == NULL_BLOCK
    ]
    assert sorted(wiped) == sorted(spoilt)
    assert set(wiped) < set(next_owner.block_table)
