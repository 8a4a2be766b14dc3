from __future__ import annotations

import random

import pytest

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.events import AllCleared, BlockRemoved, BlockStored, KVEvent
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.kv.tiers import LowerTiers
from nanoengine.engine.sequence import Sequence
from nanoengine.sampling_params import SamplingParams
from tests.engine.toys import make_sequence

B = 4


def listened(num_blocks: int = 8, host: int = 0) -> tuple[BlockManager, list[KVEvent]]:
    manager = BlockManager(num_blocks, B, tiers=LowerTiers(HostTier(host) if host else None), hash_seed=1)
    events: list[KVEvent] = []
    manager.pool.on_event = events.append
    return manager, events


def run(manager: BlockManager, seq: Sequence) -> Sequence:
    """Admit a sequence, compute its prompt, and end it."""
    assert manager.admit(seq) is not None
    manager.publish(seq, seq.num_tokens)
    manager.free(seq)
    manager.take_transfers()
    manager.commit()
    return seq


def test_each_full_block_is_stored_once_behind_its_parent() -> None:
    manager, events = listened()
    run(manager, make_sequence(0, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    first, second = events
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.parent_hash == b""
    assert second.parent_hash == first.hash
    assert [event.token_ids(B) for event in (first, second)] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    run(manager, make_sequence(1, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert len(events) == 2, "what is known is not stored again"


def test_a_router_can_compute_the_hashes_from_tokens() -> None:
    manager, events = listened()
    run(manager, make_sequence(0, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    hash = b""
    for event in events:
        assert isinstance(event, BlockStored)
        hash = manager.pool.hash_block(hash, event.token_bytes)
        assert event.hash == hash


def test_the_tokens_of_a_salted_block_are_read_behind_the_salt() -> None:
    manager, events = listened()
    run(manager, Sequence(0, [1, 2, 3, 4, 5, 6, 7, 8, 9], SamplingParams(), cache_salt="tenant"))
    run(manager, make_sequence(1, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert [event.token_ids(B) for event in stored] == [[1, 2, 3, 4], [5, 6, 7, 8]] * 2
    assert len({event.hash for event in stored}) == 4, "other salts, other hashes, all along the chain"


def test_an_evicted_block_is_removed() -> None:
    manager, events = listened(2)
    run(manager, make_sequence(0, [1] * (B + 1)))
    [stored] = events
    assert isinstance(stored, BlockStored)
    manager.pool.release(manager.pool.allocate(2))
    assert events[1:] == [BlockRemoved(stored.hash)]


def test_a_block_that_host_memory_keeps_is_not_removed_before_that_loses_it() -> None:
    manager, events = listened(2, host=1)
    run(manager, make_sequence(0, [1] * (B + 1)))
    manager.pool.release(manager.pool.allocate(2))
    assert len(events) == 1
    manager.take_transfers()
    manager.commit()
    other = make_sequence(1, [2] * (B + 1))
    assert manager.admit(other) == 0
    manager.publish(other, B + 1)
    other.num_computed_tokens = B + 1
    manager.swap_out(other)  # pushes the first one out
    first = events[0]
    assert isinstance(first, BlockStored)
    assert [event for event in events if isinstance(event, BlockRemoved)] == [BlockRemoved(first.hash)]


def test_what_a_failed_step_published_is_removed_children_first() -> None:
    manager, events = listened()
    seq = make_sequence(0, [1] * 9)
    manager.admit(seq)
    manager.publish(seq, 9, settled=False)
    hashes = [event.hash for event in events if isinstance(event, BlockStored)]
    manager.take_transfers()
    manager.rollback()
    assert events[2:] == [BlockRemoved(hash) for hash in reversed(hashes)]


def test_a_reset_that_is_refused_says_nothing_and_one_that_works_says_so() -> None:
    manager, events = listened()
    seq = make_sequence(0, [1] * 9)
    manager.admit(seq)
    assert not manager.reset_prefix_cache()
    assert events == []
    manager.free(seq)
    assert manager.reset_prefix_cache()
    assert events == [AllCleared()]


@pytest.mark.parametrize("host", [0, 2])
def test_a_listener_always_knows_what_is_cached(host: int) -> None:
    manager, events = listened(6, host)
    draw = random.Random(0)
    known: dict[bytes, int] = {}
    for seq_id in range(300):
        seq = make_sequence(seq_id, [draw.randint(0, 1)] * draw.randint(1, 3 * B) + [2] * draw.randint(0, 2 * B))
        if manager.admit(seq) is None:
            continue
        seq.num_computed_tokens = seq.num_tokens
        manager.publish(seq, seq.num_tokens, settled=False)
        manager.take_transfers()
        if draw.random() < 0.2:
            manager.rollback()
            manager.free(seq)
        else:
            manager.commit()
            (manager.swap_out if draw.random() < 0.3 else manager.free)(seq)
        if draw.random() < 0.02:
            assert manager.reset_prefix_cache()
        for event in events:
            if isinstance(event, AllCleared):
                known.clear()
            else:
                known[event.hash] = known.get(event.hash, 0) + (1 if isinstance(event, BlockStored) else -1)
        events.clear()
        cached: dict[bytes, int] = {}
        for prefix in manager.pool.prefixes():
            cached[prefix.hash] = cached.get(prefix.hash, 0) + 1
        assert {hash: count for hash, count in known.items() if count} == cached
