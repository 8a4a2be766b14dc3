from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.engine.kv.block_pool import NULL_BLOCK, BlockPool, Prefix
from nanoengine.engine.kv.events import BlockRemoved, BlockStored
from tests.engine.kv.toys import FAST, free_order, snapshot


def hash_of(pool: BlockPool, parent: Prefix | None, token_bytes: bytes) -> bytes:
    return pool.hash_block(b"" if parent is None else parent.hash, token_bytes)


def find(pool: BlockPool, parent: Prefix | None, token_bytes: bytes) -> Prefix | None:
    return pool.find(hash_of(pool, parent, token_bytes), parent, token_bytes)


def publish_at(pool: BlockPool, block: int, parent: Prefix | None, token_bytes: bytes, group: int = 0) -> Prefix:
    prefix = pool.add(hash_of(pool, parent, token_bytes), parent, token_bytes)
    pool.attach(block, prefix, group)
    return prefix


def published(pool: BlockPool, token_bytes: bytes, parent: Prefix | None = None, group: int = 0) -> tuple[int, Prefix]:
    """A block in use that holds these tokens."""
    [block] = pool.allocate(1)
    return block, publish_at(pool, block, parent, token_bytes, group)


def blocks_of(prefix: Prefix | None, group: int = 0) -> tuple[int, ...]:
    """The copies of a prefix in the pool."""
    kv = None if prefix is None else prefix.kv[group]
    return () if kv is None else kv.blocks


def test_fresh_blocks_are_handed_out_in_order_with_one_reference_and_no_content() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.ref_counts == [0, 1, 1, 1, 0]
    assert pool.contents == [None] * 5
    assert free_order(pool) == [4]
    pool.check()


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(3)
    assert NULL_BLOCK not in pool.allocate(3)
    assert pool.num_free == 0


def test_the_null_block_cannot_be_released() -> None:
    with pytest.raises(RuntimeError, match=r"block 0 "):
        BlockPool(3).release([NULL_BLOCK])


def test_usage_counts_usable_blocks_only() -> None:
    pool = BlockPool(4)
    assert pool.usage == 0.0
    pool.allocate(3)
    assert pool.usage == 0.75
    pool.allocate(1)
    assert pool.usage == 1.0


def test_released_blocks_with_content_go_to_the_tail_in_the_order_given() -> None:
    pool = BlockPool(5)
    for name in (b"a", b"b", b"c", b"d"):
        published(pool, name)
    pool.release([3, 1])
    pool.release([4])
    assert free_order(pool) == [5, 3, 1, 4]
    assert pool.allocate(2) == [5, 3]


def test_released_blocks_without_content_are_the_next_to_be_used() -> None:
    pool = BlockPool(5)
    full = [published(pool, name)[0] for name in (b"a", b"b")]
    empty = pool.allocate(2)
    pool.release(full)
    pool.release(empty)
    assert set(free_order(pool)[:3]) == {*empty, 5}
    assert free_order(pool)[3:] == full
    pool.check()


def test_a_free_block_whose_content_is_withdrawn_is_the_next_to_be_used() -> None:
    pool = BlockPool(3)
    blocks = [published(pool, name)[0] for name in (b"a", b"b", b"c")]
    pool.release(blocks)
    pool.withdraw(blocks[1])
    assert free_order(pool) == [blocks[1], blocks[0], blocks[2]]
    pool.check()


def test_a_block_with_two_references_is_free_after_the_second_release() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.acquire([block])
    pool.release([block])
    assert free_order(pool) == [2]
    pool.release([block])
    assert free_order(pool) == [block, 2]


def test_double_free_raises_and_keeps_the_count_at_zero() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.release([block])
    with pytest.raises(RuntimeError, match=f"block {block} is released more often"):
        pool.release([block])
    assert pool.ref_counts[block] == 0
    assert free_order(pool) == [1, 2]
    pool.check()


def test_a_hit_takes_its_block_from_the_middle_of_the_free_list() -> None:
    pool = BlockPool(4)
    for name in (b"a", b"b", b"c", b"d"):
        published(pool, name)
    pool.release([1, 2, 3, 4])
    pool.acquire([3])
    assert free_order(pool) == [1, 2, 4]
    assert pool.ref_counts[3] == 1
    pool.check()


def test_a_free_block_keeps_its_content_until_it_is_allocated_again() -> None:
    pool = BlockPool(2)
    block, prefix = published(pool, b"tokens")
    pool.release([block])
    assert find(pool, None, b"tokens") is prefix
    pool.allocate(1)  # the unused block goes first
    assert find(pool, None, b"tokens") is prefix
    assert pool.allocate(1) == [block]
    assert find(pool, None, b"tokens") is None
    assert pool.contents[block] is None
    assert pool.index == {}


def test_the_least_recently_used_content_is_evicted_first() -> None:
    pool = BlockPool(3)
    blocks = [published(pool, name)[0] for name in (b"a", b"b", b"c")]
    pool.release(blocks)
    pool.acquire(blocks[:1])
    pool.release(blocks[:1])  # "a" is now the most recently used
    pool.allocate(1)
    assert [find(pool, None, name) is not None for name in (b"a", b"b", b"c")] == [True, False, True]


def test_equal_tokens_behind_different_parents_are_different_content() -> None:
    pool = BlockPool(4)
    _, left = published(pool, b"left")
    _, right = published(pool, b"right")
    published(pool, b"same", left)
    assert find(pool, left, b"same") is not None
    assert find(pool, right, b"same") is None
    assert find(pool, None, b"same") is None


def test_equal_tokens_behind_different_parents_have_different_hashes() -> None:
    pool = BlockPool(2)
    _, left = published(pool, b"left")
    _, right = published(pool, b"right")
    assert len({hash_of(pool, parent, b"same") for parent in (None, left, right)}) == 3


def test_equal_content_computed_twice_survives_the_loss_of_one_copy() -> None:
    pool = BlockPool(2)
    first, prefix = published(pool, b"tokens")
    second, same = published(pool, b"tokens")
    assert same is prefix
    pool.release([first])
    assert pool.allocate(1) == [first]
    found = find(pool, None, b"tokens")
    assert found is prefix
    assert blocks_of(found) == (second,)
    pool.withdraw(second)
    assert find(pool, None, b"tokens") is None
    pool.check()


def test_a_block_is_published_once() -> None:
    pool = BlockPool(1)
    block, _ = published(pool, b"tokens")
    with pytest.raises(AssertionError, match="published already"):
        publish_at(pool, block, None, b"others")


def test_withdrawing_a_block_without_content_does_nothing() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    before = snapshot(pool)
    pool.withdraw(1)
    assert snapshot(pool) == before


class TestForcedCollision:
    """Every block has the same hash: only comparing tokens and parents can tell them apart."""

    @pytest.fixture
    def pool(self, monkeypatch: pytest.MonkeyPatch) -> BlockPool:
        monkeypatch.setattr(BlockPool, "hash_block", lambda *_: b"always the same")
        return BlockPool(6)

    def test_different_tokens_are_a_miss(self, pool: BlockPool) -> None:
        published(pool, b"tokens")
        assert find(pool, None, b"others") is None

    def test_equal_tokens_behind_different_parents_are_a_miss(self, pool: BlockPool) -> None:
        _, left = published(pool, b"left")
        _, right = published(pool, b"right")
        published(pool, b"same", left)
        assert find(pool, right, b"same") is None
        assert find(pool, None, b"same") is None

    def test_a_difference_far_up_the_chain_is_a_miss(self, pool: BlockPool) -> None:
        _, left = published(pool, b"left")
        _, right = published(pool, b"right")
        _, left_child = published(pool, b"child", left)
        _, right_child = published(pool, b"child", right)
        published(pool, b"grandchild", left_child)
        assert find(pool, left_child, b"grandchild") is not None
        assert find(pool, right_child, b"grandchild") is None

    def test_colliding_content_is_kept_apart_and_forgotten_apart(self, pool: BlockPool) -> None:
        a, _ = published(pool, b"a")
        b, prefix = published(pool, b"b")
        pool.withdraw(a)
        assert find(pool, None, b"a") is None
        assert find(pool, None, b"b") is prefix
        pool.check()
        pool.withdraw(b)
        assert pool.index == {}


def test_an_evicted_parent_stays_in_the_index_and_has_its_children_when_it_is_computed_again() -> None:
    """Behind equal tokens the K/V of the child is what it was, and a group that forgets has no K/V of the beginning."""
    pool = BlockPool(3)
    parent_block, parent = published(pool, b"parent")
    child_block, child = published(pool, b"child", parent)
    pool.withdraw(parent_block)
    assert find(pool, None, b"parent") is parent
    assert (blocks_of(parent), blocks_of(child)) == ((), (child_block,))
    pool.check()
    again, same = published(pool, b"parent")
    assert same is parent
    assert blocks_of(parent) == (again,)
    assert find(pool, parent, b"child") is child
    pool.check()


def test_a_chain_leaves_the_index_with_the_last_thing_that_anybody_has_of_it() -> None:
    pool = BlockPool(3)
    blocks, prefix = [], None
    for name in (b"a", b"b", b"c"):
        block, prefix = published(pool, name, prefix)
        blocks.append(block)
    pool.withdraw(blocks[0])
    pool.withdraw(blocks[1])
    assert len(pool.index) == 3
    pool.withdraw(blocks[2])
    assert not pool.index
    pool.check()


def test_who_has_come_as_far_as_a_prefix_keeps_it_and_its_ancestors() -> None:
    pool = BlockPool(2)
    first, parent = published(pool, b"parent")
    second, child = published(pool, b"child", parent)
    pool.use(child)
    pool.use(child)
    for block in (first, second):
        pool.withdraw(block)
    pool.leave(child)
    assert find(pool, find(pool, None, b"parent"), b"child") is child
    pool.check()
    pool.leave(child)
    assert not pool.index
    assert not parent.is_known
    pool.check()


def test_of_a_prefix_each_group_has_copies_of_its_own() -> None:
    pool = BlockPool(4, num_groups=2)
    pool.events = []
    one, prefix = published(pool, b"tokens")
    other, same = published(pool, b"tokens", group=1)
    twin, _ = published(pool, b"tokens", group=1)
    assert same is prefix
    assert [blocks_of(prefix, group) for group in (0, 1)] == [(one,), (other, twin)]
    pool.check()
    pool.withdraw(other)
    pool.withdraw(twin)
    assert [blocks_of(prefix, group) for group in (0, 1)] == [(one,), ()]
    assert find(pool, None, b"tokens") is prefix
    pool.withdraw(one)
    assert find(pool, None, b"tokens") is None
    hash = prefix.hash
    stored = [BlockStored(hash, b"", b"tokens", group) for group in (0, 1)]
    assert pool.events == [*stored, BlockRemoved(hash, 1), BlockRemoved(hash, 0)]
    pool.check()


def test_what_is_condemned_leaves_the_index_though_sequences_have_come_as_far() -> None:
    pool = BlockPool(1)
    block, prefix = published(pool, b"tokens")
    pool.use(prefix)
    pool.withdraw(block)
    pool.forget(prefix)
    assert not pool.index
    _, again = published(BlockPool(1), b"tokens")
    assert again is not prefix
    pool.leave(prefix)
    assert not pool.index
    pool.check()


def test_hash_seed_is_drawn_anew_for_each_pool() -> None:
    hashes = {BlockPool(1).hash_block(b"", b"tokens") for _ in range(8)}
    assert len(hashes) == 8


def test_a_given_hash_seed_repeats_and_matters() -> None:
    def hash_with(seed: int) -> bytes:
        return BlockPool(1, hash_seed=seed).hash_block(b"", b"tokens")

    assert hash_with(1) == hash_with(1) != hash_with(2)
    assert len(hash_with(1)) == 16


def test_reset_is_refused_while_a_block_is_in_use_and_changes_nothing() -> None:
    pool = BlockPool(3)
    published(pool, b"tokens")
    before = snapshot(pool)
    assert pool.clear() is False
    assert snapshot(pool) == before


def test_reset_forgets_everything_once_all_blocks_are_free() -> None:
    pool = BlockPool(3)
    block, _ = published(pool, b"tokens")
    pool.release([block])
    assert pool.clear() is True
    assert find(pool, None, b"tokens") is None
    pool.check()
    assert len(pool.allocate(3)) == 3


def corrupt_count(pool: BlockPool) -> None:
    pool.ref_counts[1] = 0


def corrupt_free_list(pool: BlockPool) -> None:
    pool.cached_blocks[1] = None


def corrupt_empty_blocks(pool: BlockPool) -> None:
    pool.empty_blocks.append(1)


def corrupt_promises(pool: BlockPool) -> None:
    pool.uncommitted[3] = "a plan"


def corrupt_null_block(pool: BlockPool) -> None:
    pool.ref_counts[NULL_BLOCK] = 1


def corrupt_contents(pool: BlockPool) -> None:
    pool.contents[1] = None


def corrupt_index(pool: BlockPool) -> None:
    pool.index.clear()


def corrupt_copies(pool: BlockPool) -> None:
    for prefix in pool.prefixes():
        for kv in filter(None, prefix.kv):
            kv.blocks += (2,)


def corrupt_group(pool: BlockPool) -> None:
    for prefix in pool.prefixes():
        for kv in filter(None, prefix.kv):
            kv.group = 1


def corrupt_uses(pool: BlockPool) -> None:
    for prefix in pool.prefixes():
        prefix.num_uses -= 1


@pytest.mark.parametrize(
    "corrupt",
    [
        corrupt_count,
        corrupt_free_list,
        corrupt_empty_blocks,
        corrupt_promises,
        corrupt_null_block,
        corrupt_contents,
        corrupt_index,
        corrupt_copies,
        corrupt_group,
        corrupt_uses,
    ],
)
def test_check_notices_every_kind_of_corruption(corrupt: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(3, num_groups=2)
    _, parent = published(pool, b"tokens")
    published(pool, b"child", parent)
    pool.check()
    corrupt(pool)
    with pytest.raises(AssertionError):
        pool.check()


@FAST
@given(
    st.lists(st.tuples(st.sampled_from(["allocate", "acquire", "release", "publish", "withdraw"]), st.integers(0, 99)))
)
def test_any_run_of_calls_agrees_with_a_slow_model_of_the_pool(calls: list[tuple[str, int]]) -> None:
    pool = BlockPool(6)
    counts = dict.fromkeys(range(1, 7), 0)
    free = list(range(1, 7))
    contents: dict[int, bytes] = {}
    for name, number in calls:
        block = 1 + number % 6
        free.sort(key=lambda each: each in contents)  # empty ones first
        if name == "allocate" and number % 4 <= len(free):
            taken = pool.allocate(number % 4)
            num_empty = sum(each not in contents for each in free)
            assert taken[num_empty:] == free[num_empty : len(taken)], "the least recently used"
            assert set(taken[:num_empty]) <= {each for each in free if each not in contents}
            free = [each for each in free if each not in taken]
            for each in taken:
                counts[each] = 1
                contents.pop(each, None)
        elif name == "acquire" and (counts[block] or block in contents):
            pool.acquire([block])
            counts[block] += 1
            free = [each for each in free if each != block]
        elif name == "release" and counts[block]:
            pool.release([block])
            counts[block] -= 1
            free += [block] if counts[block] == 0 else []
        elif name == "publish" and counts[block] and block not in contents:
            contents[block] = b"%d" % (number % 3)  # few contents, so that copies occur
            publish_at(pool, block, None, contents[block])
        elif name == "withdraw":
            pool.withdraw(block)
            contents.pop(block, None)
        pool.check()
        assert pool.ref_counts[1:] == list(counts.values())
        assert sorted(free_order(pool)) == sorted(free)
        assert [each for each in free_order(pool) if each in contents] == [each for each in free if each in contents]
        for content in (b"0", b"1", b"2"):
            prefix = find(pool, None, content)
            assert sorted(blocks_of(prefix)) == sorted(block for block, held in contents.items() if held == content)
