"""The prefix cache and its order of eviction, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
import xxhash

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.seams import KVLayout
from nanoengine.core.sequence import Request, Sequence

SIZE = 4


def make_seq(tokens: list[int], number: int = 0, max_tokens: int = 20, **request: Any) -> Sequence:
    own = Request(str(number), None, tokens, CoreSamplingParams(max_tokens=max_tokens), **request)
    own.sequences.append(Sequence(number, own))
    return own.sequences[0]


def live(blocks: BlockManager, tokens: list[int], number: int = 0, **request: Any) -> list[int]:
    """A sequence computes its prompt and ends; returns its blocks."""
    seq = make_seq(tokens, number, **request)
    assert blocks.admit(seq, blocks.find(seq), [])
    [table] = [table.copy() for table in seq.block_tables]
    blocks.publish(seq, len(tokens))
    blocks.release(seq)
    return table


def num_hits(blocks: BlockManager, tokens: list[int], number: int = 9, **request: Any) -> int:
    return blocks.find(make_seq(tokens, number, **request))


def test_who_is_admitted_has_room_for_the_next_token_and_hits_are_not_free_blocks() -> None:
    blocks = BlockManager(2, SIZE)
    for tokens, fits in (([1] * 7, True), ([1] * 8, False)):
        seq = make_seq(tokens)
        assert blocks.admit(seq, blocks.find(seq), []) == fits
        blocks.release(seq)
    live(blocks, [1] * 7)
    assert num_hits(blocks, [1] * 9) == 1
    seq = make_seq([1] * 9)
    assert not blocks.admit(seq, blocks.find(seq), []), "it needs three, and one of the two free ones is its hit"
    assert blocks.num_free == 2
    assert blocks.ref_counts == [0, 0, 0]


def test_what_nobody_can_find_is_taken_first_then_what_was_used_least_recently_ends_before_beginnings() -> None:
    blocks = BlockManager(9, SIZE)
    old, new = live(blocks, [1] * 11), live(blocks, [2] * 11, 1)
    live(blocks, [1] * 11, 2)  # it is used once more
    order = [blocks._allocate() for _ in range(9)]
    cached = [*reversed(new[:2]), *reversed(old[:2])]
    assert order[5:] == cached
    assert set(order[:5]).isdisjoint(cached)


@pytest.mark.parametrize(
    ("first", "second", "is_shared"),
    [
        ({}, {}, True),
        ({"cache_salt": "a"}, {"cache_salt": "a"}, True),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, False),
        ({"cache_salt": "a"}, {}, False),
        ({"client": "a"}, {"client": "b"}, True),
    ],
)
def test_prefixes_are_shared_among_requests_of_equal_salt(first: Any, second: Any, is_shared: bool) -> None:
    blocks = BlockManager(10, SIZE)
    live(blocks, [1] * 9, **first)
    assert num_hits(blocks, [1] * 9, **second) == 2 * is_shared


def test_without_prefix_caching_completions_of_one_request_share() -> None:
    blocks = BlockManager(10, SIZE, enable_prefix_caching=False)
    live(blocks, [1] * 9, number=3)
    assert num_hits(blocks, [1] * 9, number=3) == 2
    assert num_hits(blocks, [1] * 9, number=4) == 0


def test_a_hash_covers_all_tokens_before_its_block_and_is_a_secret() -> None:
    blocks, other = BlockManager(10, SIZE), BlockManager(10, SIZE)
    live(blocks, [1] * 4 + [2] * 5)
    assert num_hits(blocks, [2] * 5) == 0
    live(other, [1] * 4 + [2] * 5)
    assert blocks.index[0].keys().isdisjoint(other.index[0])


def test_tokens_are_compared_where_hashes_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BlockManager(10, SIZE)
    monkeypatch.setattr(xxhash, "xxh3_128_digest", lambda _, __: bytes(16))
    live(blocks, [1] * 5)
    assert num_hits(blocks, [1] * 5) == 1
    assert num_hits(blocks, [2] * 5) == 0


def test_a_reset_forgets_all_but_nothing_while_a_sequence_has_blocks() -> None:
    blocks = BlockManager(10, SIZE)
    live(blocks, [1] * 9)
    seq = make_seq([1] * 9)
    assert blocks.admit(seq, blocks.find(seq), [])
    assert not blocks.reset()
    assert num_hits(blocks, [1] * 9) == 2
    blocks.release(seq)
    assert blocks.reset()
    assert num_hits(blocks, [1] * 9) == 0
    assert blocks.num_free == 10


def test_blocks_that_may_hold_nan_are_cleared_unless_they_can_be_found() -> None:
    blocks = BlockManager(10, SIZE, [KVLayout(), KVLayout()])
    seq = make_seq([1] * 11)
    assert blocks.admit(seq, blocks.find(seq), [])
    first, second, third = map(set, zip(*seq.block_tables, strict=True))  # of both groups
    blocks.publish(seq, 4)
    blocks.mark_dirty(seq)
    assert blocks.dirty == second | third, "the first is sound: a store may be given it, and must not get zeros"
    blocks.publish(seq, 8)
    assert blocks.dirty == third, "all of the second was written since"
    blocks.invalidate(seq)
    assert blocks.dirty == first | second | third
