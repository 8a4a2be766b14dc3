"""Forks share blocks until they write: the first to write into a shared block gets a copy, the last one keeps the block."""

from __future__ import annotations

import pytest

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.messages import Place, Tier, Transfer
from nanoengine.engine.sequence import Sequence
from tests.engine.toys import make_sequence, snapshot, tell

B = 4


def run_prompt(manager: BlockManager, seq_id: int, prompt: list[int]) -> Sequence:
    """Admit a new sequence and compute its prompt."""
    seq = make_sequence(seq_id, prompt)
    cached = manager.admit(seq)
    assert cached is not None
    seq.num_computed_tokens = seq.num_tokens
    manager.publish(seq, seq.num_tokens)
    return seq


def fork(manager: BlockManager, parent: Sequence, seq_id: int) -> Sequence:
    child = make_sequence(seq_id, parent.token_ids)
    child.num_computed_tokens = parent.num_computed_tokens
    manager.fork(parent, child)
    return child


def grow(manager: BlockManager, seq: Sequence, *tokens: int) -> None:
    """Append tokens one by one and compute each, as decode steps do."""
    for token in tokens:
        tell(seq, token)
        assert manager.allocate_slots(seq) is not None
        seq.num_computed_tokens += 1


def copy(source: int, target: int) -> Transfer:
    return Transfer(Place(Tier.DEVICE, source), Place(Tier.DEVICE, target))


def transfers(manager: BlockManager) -> list[Transfer]:
    """The copies of the next plan."""
    return manager.take_orders()[0]


def hit(manager: BlockManager, prompt: list[int]) -> int | None:
    seq = make_sequence(999, prompt)
    cached = manager.admit(seq)
    manager.free(seq)
    return cached


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_takes_no_block_and_shares_the_half_full_one_too(caching: bool) -> None:
    manager = BlockManager(6, B, caching)
    parent = run_prompt(manager, 0, [1] * 6)
    num_free = manager.pool.num_free
    child = fork(manager, parent, 1)
    assert child.block_tables[0] == parent.block_tables[0]
    assert child.block_tables[0] is not parent.block_tables[0]
    assert manager.pool.num_free == num_free
    assert [manager.pool.ref_counts[block] for block in parent.block_tables[0]] == [2, 2]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("first", ["parent", "child"])
def test_the_first_writer_gets_a_copy_and_the_last_holder_writes_in_place(first: str, caching: bool) -> None:
    manager = BlockManager(6, B, caching)
    parent = run_prompt(manager, 0, [1] * 6)
    child = fork(manager, parent, 1)
    head, shared = parent.block_tables[0]
    one, other = (parent, child) if first == "parent" else (child, parent)
    grow(manager, one, 7)
    assert one.block_tables[0][0] == head
    own = one.block_tables[0][1]
    assert own != shared
    assert transfers(manager) == [copy(shared, own)]
    grow(manager, other, 8)
    assert other.block_tables[0] == [head, shared]
    assert transfers(manager) == []
    assert manager.stats.num_copied_blocks == 1


@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_that_fills_its_blocks_is_forked_without_any_copy(caching: bool) -> None:
    manager = BlockManager(6, B, caching)
    parent = run_prompt(manager, 0, [1] * (2 * B))
    children = [fork(manager, parent, i) for i in (1, 2)]
    assert [len(child.block_tables[0]) for child in children] == [2, 2], (
        "the parent's block for its next token is its own"
    )
    for seq in (parent, *children):
        grow(manager, seq, 9)
    assert transfers(manager) == []
    assert len({seq.block_tables[0][2] for seq in (parent, *children)}) == 3


@pytest.mark.parametrize("num_children", [1, 2, 5])
def test_of_all_who_share_a_block_all_but_one_copy_it(num_children: int) -> None:
    manager = BlockManager(10, B)
    parent = run_prompt(manager, 0, [1] * 5)
    family = [parent, *(fork(manager, parent, 1 + i) for i in range(num_children))]
    shared = parent.block_tables[0][1]
    for i, seq in enumerate(family):
        grow(manager, seq, i)
    assert len(transfers(manager)) == num_children
    assert len({seq.block_tables[0][1] for seq in family}) == num_children + 1
    assert family[-1].block_tables[0][1] == shared


def test_whoever_is_left_alone_with_a_block_writes_in_place() -> None:
    manager = BlockManager(6, B)
    parent = run_prompt(manager, 0, [1] * 5)
    child = fork(manager, parent, 1)
    table = list(child.block_tables[0])
    manager.free(parent)
    grow(manager, child, 7)
    assert child.block_tables[0] == table
    assert transfers(manager) == []


def test_a_grandchild_shares_what_its_line_shares() -> None:
    manager = BlockManager(8, B)
    parent = run_prompt(manager, 0, [1] * 5)
    child = fork(manager, parent, 1)
    grandchild = fork(manager, child, 2)
    assert manager.pool.ref_counts[parent.block_tables[0][1]] == 3
    for i, seq in enumerate((grandchild, child, parent)):
        grow(manager, seq, i)
    assert len({seq.block_tables[0][1] for seq in (parent, child, grandchild)}) == 3


def test_a_copy_is_published_when_it_is_full_and_never_before() -> None:
    manager = BlockManager(8, B)
    parent = run_prompt(manager, 0, [1] * 5)
    child = fork(manager, parent, 1)
    grow(manager, parent, 2, 2, 2)
    grow(manager, child, 3, 3)
    assert hit(manager, [*[1] * 5, 3, 3, 3, 0]) == B
    tell(parent, 0)
    manager.free(parent)
    grow(manager, child, 3)
    tell(child, 0)
    manager.free(child)
    assert hit(manager, [*[1] * 5, 2, 2, 2, 0]) == 2 * B
    assert hit(manager, [*[1] * 5, 3, 3, 3, 0]) == 2 * B
    manager.check()


def test_a_block_filled_since_it_was_last_published_can_be_forked() -> None:
    """Decode publishes a full block only when it needs the next one; a fork may come in between."""
    manager = BlockManager(8, B)
    parent = run_prompt(manager, 0, [1] * 5)
    grow(manager, parent, 2, 2, 2)
    tell(parent, 0)
    child = fork(manager, parent, 1)
    for seq in (parent, child):
        assert manager.allocate_slots(seq) is not None
    manager.free(parent)
    manager.free(child)
    manager.check()
    assert hit(manager, [*[1] * 5, 2, 2, 2, 0]) == 2 * B


@pytest.mark.parametrize("lookahead", [0, 9])
def test_growth_that_finds_no_block_for_its_copy_changes_nothing(lookahead: int) -> None:
    manager = BlockManager(2, B)
    parent = run_prompt(manager, 0, [1] * 5)
    child = fork(manager, parent, 1)
    tell(child, 7)
    before = snapshot(manager.pool), list(child.block_tables[0]), child.num_slots, repr(manager.stats)
    assert manager.allocate_slots(child, lookahead) is None
    assert (snapshot(manager.pool), child.block_tables[0], child.num_slots, repr(manager.stats)) == before
    assert transfers(manager) == []


def test_growth_that_needs_a_copy_and_a_block_takes_both_or_none() -> None:
    manager = BlockManager(3, B)
    parent = run_prompt(manager, 0, [1] * 5)
    child = fork(manager, parent, 1)
    tell(child, 7)
    before = snapshot(manager.pool)
    assert manager.allocate_slots(child, 3) is None
    assert snapshot(manager.pool) == before
    assert manager.allocate_slots(child, 2) is not None


def test_freed_families_give_every_block_back_once() -> None:
    manager = BlockManager(9, B)
    parent = run_prompt(manager, 0, [1] * 7)
    family = [parent, *(fork(manager, parent, 1 + i) for i in range(3))]
    for i, seq in enumerate(family):
        grow(manager, seq, i, i)
    for seq in family:
        manager.free(seq)
        manager.check()
    assert manager.pool.num_free == 9


# ---- beams: everybody becomes a fork of somebody, at once


def beams(manager: BlockManager, *last: int) -> list[Sequence]:
    """Forks of one prompt that have gone two tokens different ways."""
    first = run_prompt(manager, 0, [1] * 5)
    family = [first, *(fork(manager, first, 1 + i) for i in range(len(last) - 1))]
    for seq, token in zip(family, last, strict=True):
        grow(manager, seq, token, token)
    transfers(manager)
    return family


@pytest.mark.parametrize("choices", [[0, 1, 2], [2, 0, 1], [1, 1, 1], [0, 0, 2], [2, 2, 0]])
@pytest.mark.parametrize("caching", [True, False])
def test_after_a_refork_each_holds_exactly_what_its_parent_held(choices: list[int], caching: bool) -> None:
    manager = BlockManager(12, B, caching)
    family = beams(manager, 5, 6, 7)
    tables = [list(seq.block_tables[0]) for seq in family]
    manager.refork(family, [family[choice] for choice in choices])
    assert [seq.block_tables[0] for seq in family] == [tables[choice] for choice in choices]
    manager.check()
    for block in {block for table in tables for block in table}:
        holders = sum(block in seq.block_tables[0] for seq in family)
        assert manager.pool.ref_counts[block] == holders
    for seq, choice in zip(family, choices, strict=True):
        seq.token_ids = [*[1] * 5, 5 + choice, 5 + choice]
    for seq in family:
        grow(manager, seq, 9)
    assert len({seq.block_tables[0][1] for seq in family}) == 3
    assert len(transfers(manager)) == 3 - len(set(choices))
    for seq in family:
        manager.free(seq)
    assert manager.pool.num_free == 12


def test_a_refork_of_beams_that_just_filled_a_block_publishes_it_for_its_own_tokens() -> None:
    manager = BlockManager(12, B)
    family = beams(manager, 5, 6)
    for seq, token in zip(family, (5, 6), strict=True):
        grow(manager, seq, token)
        tell(seq, 0)
    manager.refork(family, [family[1], family[1]])
    for seq in family:
        seq.token_ids = [*[1] * 5, 6, 6, 6, 0]
        assert manager.allocate_slots(seq) is not None
        manager.free(seq)
    assert hit(manager, [*[1] * 5, 5, 5, 5, 0]) == 2 * B
    assert hit(manager, [*[1] * 5, 6, 6, 6, 0]) == 2 * B


def test_beams_with_lookahead_slots_share_none_that_they_will_write() -> None:
    manager = BlockManager(20, B)
    family = beams(manager, 5, 6)
    for seq in family:
        assert manager.allocate_slots(seq, 2 * B) is not None
    manager.refork(family, [family[0], family[0]])
    for seq in family:
        tell(seq, 1)
        assert manager.allocate_slots(seq, 2 * B) is not None
    ahead = [seq.block_tables[0][seq.num_computed_tokens // B :] for seq in family]
    assert not set(ahead[0]) & set(ahead[1])


# ---- lookahead


@pytest.mark.parametrize(("lookahead", "blocks"), [(0, 2), (1, 2), (2, 2), (3, 3), (6, 3), (7, 4)])
def test_lookahead_takes_the_blocks_that_its_tokens_would_need(lookahead: int, blocks: int) -> None:
    manager = BlockManager(8, B)
    seq = run_prompt(manager, 0, [1] * 5)
    tell(seq, 2)
    assert manager.allocate_slots(seq, lookahead) is not None
    assert len(seq.block_tables[0]) == blocks
    assert seq.num_slots >= seq.num_tokens + lookahead


def test_trim_takes_back_what_no_token_needs_and_no_more() -> None:
    manager = BlockManager(8, B)
    seq = run_prompt(manager, 0, [1] * 5)
    tell(seq, 2)
    assert manager.allocate_slots(seq, 10) is not None
    tell(seq, 3, 3, 3)  # accepted: nine tokens
    seq.num_computed_tokens = 8
    table = list(seq.block_tables[0])
    manager.trim(seq)
    assert seq.block_tables[0] == table[:3]
    assert seq.num_slots == 3 * B
    assert manager.pool.num_free == 5
    manager.trim(seq)
    assert seq.block_tables[0] == table[:3]
    manager.check()


def test_lookahead_slots_are_never_published() -> None:
    manager = BlockManager(8, B)
    seq = run_prompt(manager, 0, [1] * 3)
    tell(seq, 2)
    assert manager.allocate_slots(seq, 9) is not None
    seq.num_computed_tokens = 4
    manager.publish(seq, 4)
    assert [manager.pool.contents[block] is not None for block in seq.block_tables[0]] == [True, False, False, False]
    manager.free(seq)
    assert hit(manager, [1, 1, 1, 2, *[0] * 8]) == B


def test_a_lookahead_that_does_not_fit_changes_nothing_and_a_shorter_one_may_fit() -> None:
    manager = BlockManager(3, B)
    seq = run_prompt(manager, 0, [1] * 5)
    tell(seq, 2)
    before = snapshot(manager.pool), list(seq.block_tables[0]), seq.num_slots
    assert manager.allocate_slots(seq, 7) is None
    assert (snapshot(manager.pool), seq.block_tables[0], seq.num_slots) == before
    assert manager.allocate_slots(seq, 6) is not None


def test_trim_after_a_fork_keeps_the_look_for_shared_blocks() -> None:
    manager = BlockManager(8, B)
    parent = run_prompt(manager, 0, [1] * 5)
    child = fork(manager, parent, 1)
    manager.trim(child)
    manager.trim(parent)
    assert (parent.num_slots, child.num_slots) == (0, 0)
