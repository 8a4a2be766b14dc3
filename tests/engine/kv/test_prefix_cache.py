"""PrefixCache: what is published, what is found, and what is not."""

from __future__ import annotations

import pytest

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.block_pool import BlockPool
from tests.engine.kv.test_block_manager import compute, generate, run_prompt
from tests.engine.kv.toys import (
    B,
    evict,
    make_sequence,
    num_cached,
    run,
    start,
    step,
)


def test_only_full_blocks_are_published() -> None:
    manager = BlockManager(10, B)
    seq = run_prompt(manager, 0, list(range(B + 3)))
    assert [manager.pool.contents[block] is not None for block in seq.block_table] == [True, False]


def test_a_partial_block_is_never_hit() -> None:
    manager = BlockManager(10, B)
    run_prompt(manager, 0, list(range(B + 3)))
    assert num_cached(manager, list(range(B + 3))) == B
    assert num_cached(manager, [0, 1, 2]) == 0


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
    evict(manager)
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
    seq = start(manager, 1, [1] * B + [3] * B + [4])
    assert seq.num_cached_tokens == B
    manager.take_orders()
    assert manager.rollback([seq], [seq]) == [seq]
    manager.discard(seq)
    manager.check()
    assert num_cached(manager, [1] * B + [3] * B + [4]) == B


def test_a_sequence_that_does_not_read_the_cache_hits_nothing_but_publishes() -> None:
    manager = BlockManager(10, B)
    first = run(manager, 0, [1] * 9)
    second = start(manager, 1, [1] * 9, reads_cache=False)
    assert second.num_cached_tokens == 0
    assert manager.stats.num_queried_tokens == first.num_tokens, "it has asked for nothing"
    step(manager)
    manager.condemn(start(manager, 2, [7] * 9, reads_cache=False))
    run(manager, 3, [6] * 9, reads_cache=False)
    assert num_cached(manager, [6] * 9) == 8
    manager.check()


@pytest.mark.parametrize("shared", [0, 1])
def test_a_salt_whose_bytes_equal_the_hash_of_a_parent_is_another_prefix(shared: int) -> None:
    """A first block behind such a salt has the same hash as the second block behind that parent."""
    manager = BlockManager(10, B)
    seq = run(manager, 0, [1] * B + [2] * B + [3])
    salt = seq.block_hashes[0]
    prompt = [2] * B + [3] * shared * B + [4]
    salted = make_sequence(1, prompt, cache_salt=salt)
    assert manager.admit(salted) == 0
    assert salted.block_hashes[0] == seq.block_hashes[1]
    manager.publish(salted, salted.num_tokens)
    manager.discard(salted)
    manager.check()
    assert num_cached(manager, prompt, cache_salt=salt) == B * (1 + shared)
    assert num_cached(manager, [1] * B + [2] * B + [3]) == 2 * B
    assert num_cached(manager, prompt) == 0


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
