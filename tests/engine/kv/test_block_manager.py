from __future__ import annotations

import pytest

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.block_pool import BlockPool
from nanoengine.engine.sequence import Sequence
from tests.engine.toys import free_order, make_sequence, snapshot, tell

B = 4  # the block size of all these tests


def compute(manager: BlockManager, seq: Sequence, count: int | None = None) -> list[int]:
    """Do what a step does for one sequence; returns the blocks that it published."""
    count = seq.num_uncomputed_tokens if count is None else count
    seq.num_computed_tokens += count
    before = seq.num_published
    manager.publish(seq, seq.num_computed_tokens)
    return seq.block_table[before : seq.num_published]


def run_prompt(manager: BlockManager, seq_id: int, prompt: list[int]) -> Sequence:
    """Admit a new sequence and compute its prompt."""
    seq = make_sequence(seq_id, prompt)
    cached = manager.admit(seq)
    assert cached is not None
    seq.num_computed_tokens = seq.num_cached_tokens = cached
    compute(manager, seq)
    return seq


def generate(manager: BlockManager, seq: Sequence, tokens: list[int]) -> None:
    """Append tokens one by one and compute each, as decode steps do."""
    for token in tokens:
        tell(seq, token)
        assert manager.allocate_slots(seq)
        compute(manager, seq)


def num_cached(manager: BlockManager, prompt: list[int]) -> int | None:
    """How much of a prompt a new sequence would find; the pool's references stay as they were."""
    seq = make_sequence(999, prompt)
    cached = manager.admit(seq)
    manager.free(seq)
    return cached


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
    assert manager.allocate_slots(seq)
    assert seq.block_table == table


def test_only_full_blocks_are_published() -> None:
    manager = BlockManager(10, B)
    seq = run_prompt(manager, 0, list(range(B + 3)))
    assert [manager.pool.contents[block] is not None for block in seq.block_table] == [True, False]


def test_a_partial_block_is_never_hit() -> None:
    manager = BlockManager(10, B)
    run_prompt(manager, 0, list(range(B + 3)))
    assert num_cached(manager, list(range(B + 3))) == B
    assert num_cached(manager, [0, 1, 2]) == 0


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
    assert free_order(manager.pool) == [3, 4, 2, 1]
    second = run_prompt(manager, 1, [1, 2, 3, 4, 6])
    assert second.block_table == [1, 3]
    assert free_order(manager.pool) == [4, 2]


def test_the_free_list_holds_unused_blocks_then_tails_then_heads() -> None:
    """So that eviction takes what is worth least first, and a shared prefix last."""
    manager = BlockManager(7, B)
    first = run_prompt(manager, 0, [1, 2, 3, 4, 5, 5, 5, 5, 5])
    second = run_prompt(manager, 1, [1, 2, 3, 4, 6, 6, 6, 6, 6])
    assert (first.block_table, second.block_table) == ([1, 2, 3], [1, 4, 5])
    manager.free(first)
    assert free_order(manager.pool) == [6, 7, 3, 2]
    manager.free(second)
    assert free_order(manager.pool) == [6, 7, 3, 2, 5, 4, 1]


@pytest.mark.parametrize("num_evicted", [0, 1, 2, 3])
def test_eviction_shortens_a_cached_prefix_from_its_tail(num_evicted: int) -> None:
    manager = BlockManager(4, B)
    prompt = list(range(3 * B + 1))
    manager.free(run_prompt(manager, 0, prompt))
    manager.pool.release(manager.pool.allocate(1 + num_evicted))  # the first one held the partial block
    assert num_cached(manager, prompt) == (3 - num_evicted) * B


def test_a_hit_is_not_evicted_by_the_allocation_that_follows_it() -> None:
    manager = BlockManager(3, B)
    manager.free(run_prompt(manager, 0, [1] * B + [2] * (B - 1)))  # block 1 cached, at the tail of the free list
    manager.pool.acquire([3])
    manager.pool.release([3])
    manager.pool.acquire([2])
    manager.pool.release([2])
    assert free_order(manager.pool)[0] == 1, "the cached block is the next to be evicted"
    seq = run_prompt(manager, 1, [1] * B + [3] * (2 * B - 1))
    assert seq.num_cached_tokens == B
    assert seq.block_table == [1, 3, 2]
    manager.pool.check()


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
    assert not manager.allocate_slots(first)
    assert snapshot(manager.pool) == before
    assert first.block_table == [1]


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


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1])
def test_a_prompt_that_is_cached_whole_still_computes_a_token(length: int) -> None:
    manager = BlockManager(12, B)
    prompt = list(range(length))
    first = run_prompt(manager, 0, prompt)
    generate(manager, first, [50] * B)  # so that the block of the prompt's last token is full and cached
    second = make_sequence(1, prompt)
    cached = manager.admit(second)
    assert cached == (length - 1) // B * B
    assert cached < length


def test_an_equal_block_behind_another_prefix_is_a_miss() -> None:
    manager = BlockManager(10, B)
    run_prompt(manager, 0, [1] * B + [9] * B + [0])
    assert num_cached(manager, [2] * B + [9] * B + [0]) == 0
    assert num_cached(manager, [9] * B + [0]) == 0


@pytest.mark.parametrize(
    "prompt", [[2] * B + [0], [2] * B + [9] * B + [0], [9] * B + [0]], ids=["tokens", "parents", "position"]
)
def test_a_hash_collision_is_a_miss(prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "hash_block", lambda *_: b"always the same")
    manager = BlockManager(10, B)
    run_prompt(manager, 0, [1] * B + [9] * B + [0])
    assert num_cached(manager, prompt) == 0
    assert num_cached(manager, [1] * B + [9] * B + [0]) == 2 * B


def test_token_ids_that_share_bytes_are_told_apart() -> None:
    manager = BlockManager(10, B)
    run_prompt(manager, 0, [1, 0, 0, 0, 5])
    assert num_cached(manager, [256, 0, 0, 0, 5]) == 0
    assert num_cached(manager, [65537, 0, 0, 0, 5]) == 0


def test_generated_tokens_are_found_by_a_follow_up() -> None:
    manager = BlockManager(10, B)
    seq = run_prompt(manager, 0, [1, 2, 3])
    generate(manager, seq, [4, 5, 6, 7, 8, 9])
    manager.free(seq)
    assert num_cached(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == 2 * B


@pytest.mark.parametrize("chunks", [[11], [1] * 11, [3, 5, 3], [4, 4, 3], [5, 6], [8, 3], [7, 1, 3]])
def test_chunks_publish_what_one_pass_publishes(chunks: list[int]) -> None:
    manager = BlockManager(10, B)
    prompt = list(range(11))
    seq = make_sequence(0, prompt)
    manager.admit(seq)
    published = [block for count in chunks for block in compute(manager, seq, count)]
    assert published == seq.block_table[:2]
    assert num_cached(manager, prompt) == 2 * B


def test_a_block_is_not_published_before_its_last_token_is_computed() -> None:
    manager = BlockManager(10, B)
    seq = make_sequence(0, [1] * (2 * B))
    manager.admit(seq)
    compute(manager, seq, B - 1)
    assert num_cached(manager, [1] * (2 * B)) == 0
    compute(manager, seq, 1)
    assert num_cached(manager, [1] * (2 * B)) == B


def test_equal_content_computed_twice_is_found_after_one_copy_is_evicted() -> None:
    manager = BlockManager(5, B)
    prompt = [1] * B + [2]
    twins = [make_sequence(0, prompt), make_sequence(1, prompt)]
    for seq in twins:  # both admitted before either publishes
        assert manager.admit(seq) == 0
    for seq in twins:
        compute(manager, seq)
    manager.free(twins[0])
    others = manager.pool.allocate(3)  # evicts the first copy
    manager.pool.release(others[:1])
    assert run_prompt(manager, 2, prompt).block_table[:1] == twins[1].block_table[:1]
    manager.pool.check()


def test_of_two_copies_of_a_prefix_the_one_in_use_is_shared() -> None:
    """It takes no free block; the other one would have to be revived."""
    manager = BlockManager(5, B)
    prompt = [1] * B + [2]
    twins = [make_sequence(0, prompt), make_sequence(1, prompt)]
    for seq in twins:  # both admitted before either publishes
        manager.admit(seq)
    for seq in twins:
        compute(manager, seq)
    manager.free(twins[0])
    num_free = manager.pool.num_free
    third = run_prompt(manager, 2, prompt)
    assert third.block_table[0] == twins[1].block_table[0]
    assert manager.pool.num_free == num_free - 1
    manager.pool.check()


def test_without_prefix_caching_nothing_is_shared_or_published() -> None:
    manager = BlockManager(10, B, enable_prefix_caching=False)
    first = run_prompt(manager, 0, [1] * 9)
    second = run_prompt(manager, 1, [1] * 9)
    assert second.num_cached_tokens == 0
    assert not set(first.block_table) & set(second.block_table)
    assert manager.pool.index == {}


def test_reset_is_refused_while_a_sequence_runs_and_then_empties_the_cache() -> None:
    manager = BlockManager(10, B)
    seq = run_prompt(manager, 0, [1] * 9)
    assert not manager.reset_prefix_cache()
    manager.free(seq)
    assert num_cached(manager, [1] * 9) == 8
    assert manager.reset_prefix_cache()
    assert num_cached(manager, [1] * 9) == 0


def test_what_is_withdrawn_is_a_miss_and_what_was_there_before_stays() -> None:
    manager = BlockManager(10, B)
    manager.free(run_prompt(manager, 0, [1] * B + [2]))
    seq = make_sequence(1, [1] * B + [3] * B + [4])
    assert manager.admit(seq) == B
    seq.num_computed_tokens = B
    manager.publish(seq, seq.num_tokens, settled=False)
    manager.take_transfers()
    assert manager.rollback() == {seq.block_table[1]}
    manager.free(seq)
    manager.pool.check()
    assert num_cached(manager, [1] * B + [3] * B + [4]) == B


def test_statistics_count_a_sequence_once_however_often_it_is_admitted() -> None:
    manager = BlockManager(10, B)
    first = run_prompt(manager, 0, [1] * 9)
    assert (manager.stats.num_queried_tokens, manager.stats.num_hit_tokens) == (9, 0)
    run_prompt(manager, 1, [1] * 9)
    assert (manager.stats.num_queried_tokens, manager.stats.num_hit_tokens) == (18, 8)
    manager.free(first)
    first.num_computed_tokens = 0
    assert manager.admit(first) == 8
    assert (manager.stats.num_queried_tokens, manager.stats.num_hit_tokens) == (18, 8)


def test_freeing_twice_returns_nothing_twice() -> None:
    manager = BlockManager(4, B)
    seq = run_prompt(manager, 0, [1] * 5)
    manager.free(seq)
    manager.free(seq)
    assert manager.pool.num_free == 4
    manager.pool.check()
