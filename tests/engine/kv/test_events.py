from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.events import AllCleared, BlockRemoved, BlockStored
from nanoengine.engine.kv.host_tier import HostTier
from tests.engine.kv.toys import (
    B,
    Known,
    cached,
    evict,
    fetch_and_run,
    follow,
    make_sequence,
    run,
    settle,
    start,
    step,
    tell,
)


def listened(num_blocks: int = 8, host: int = 0, disk: Path | None = None) -> BlockManager:
    manager = BlockManager(
        num_blocks,
        B,
        host=HostTier(host) if host else None,
        disk=None if disk is None else DiskTier(disk, "model", 8, 1 << 20),
        hash_seed=1,
    )
    manager.collect_events = True
    return manager


def stored(manager: BlockManager) -> list[BlockStored]:
    """What was stored since the last call, and nothing else was said."""
    events = manager.drain_events()
    assert all(isinstance(event, BlockStored) for event in events)
    return events  # type: ignore[return-value]


def test_each_full_block_is_stored_once_behind_its_parent() -> None:
    manager = listened()
    run(manager, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    first, second = stored(manager)
    assert first.parent_hash == b""
    assert second.parent_hash == first.hash
    assert [event.token_ids(B) for event in (first, second)] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    run(manager, 1, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert manager.drain_events() == [], "what is known is not stored again"


def test_nothing_is_collected_for_nobody() -> None:
    manager = BlockManager(8, B)
    run(manager, 0, [1] * 9)
    assert manager.drain_events() == []
    manager.collect_events = True
    assert manager.drain_events() == []
    run(manager, 1, [2] * 5)
    assert len(manager.drain_events()) == 1
    manager.collect_events = False
    run(manager, 2, [3] * 5)
    assert manager.drain_events() == []


def test_a_router_can_compute_the_hashes_from_tokens() -> None:
    manager = listened()
    run(manager, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    hash = b""
    for event in stored(manager):
        hash = manager.pool.hash_block(hash, event.token_bytes)
        assert event.hash == hash


def test_the_tokens_of_a_salted_block_are_read_behind_the_salt() -> None:
    manager = listened()
    run(manager, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9], cache_salt="tenant")
    run(manager, 1, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    events = stored(manager)
    assert [event.token_ids(B) for event in events] == [[1, 2, 3, 4], [5, 6, 7, 8]] * 2
    assert len({event.hash for event in events}) == 4, "other salts, other hashes, all along the chain"


def test_an_evicted_block_is_removed() -> None:
    manager = listened(2)
    run(manager, 0, [1] * (B + 1))
    [event] = stored(manager)
    evict(manager)
    assert manager.drain_events() == [BlockRemoved(event.hash)]


def test_a_block_that_host_memory_keeps_is_not_removed_before_that_loses_it() -> None:
    manager = listened(2, host=1)
    run(manager, 0, [1] * (B + 1))
    [first] = stored(manager)
    evict(manager)
    step(manager)
    assert manager.drain_events() == []
    run(manager, 1, [2] * (B + 1))
    evict(manager)  # pushes the first one out
    assert [event for event in manager.drain_events() if isinstance(event, BlockRemoved)] == [BlockRemoved(first.hash)]


def test_a_block_that_only_a_file_has_is_removed_and_stored_again_when_it_comes_back(tmp_path: Path) -> None:
    manager = listened(2, host=1, disk=tmp_path)
    fetch_and_run(manager, 0, [1] * (B + 1))
    [first] = stored(manager)
    for number in (2, 3):
        fetch_and_run(manager, number, [number] * (B + 1))
        evict(manager)
        settle(manager)
    assert BlockRemoved(first.hash) in manager.drain_events()
    assert fetch_and_run(manager, 4, [1] * (B + 1)).num_cached_tokens == B
    assert first in manager.drain_events()


def test_what_a_failed_plan_published_is_removed_children_first() -> None:
    manager = listened()
    seq = start(manager, 0, [1] * 9)
    hashes = [event.hash for event in stored(manager)]
    manager.take_orders()
    manager.rollback([seq], [seq])
    assert manager.drain_events() == [BlockRemoved(hash) for hash in reversed(hashes)]


def test_a_reset_that_is_refused_says_nothing_and_one_that_works_says_so() -> None:
    manager = listened()
    seq = make_sequence(0, [1] * 9)
    manager.admit(seq)
    assert not manager.reset_prefix_cache()
    assert manager.drain_events() == []
    manager.free(seq)
    assert manager.reset_prefix_cache()
    assert manager.drain_events() == [AllCleared()]


def test_events_are_kept_until_they_are_drained_and_nobody_is_called() -> None:
    """Whatever a listener does with them, the pool has finished what it was doing."""
    manager = listened(2)
    for number in range(5):
        run(manager, number, [number] * 5)
    manager.check()
    events = manager.drain_events()
    assert [type(event) for event in events] == [BlockStored] + [BlockRemoved, BlockStored] * 4
    events.clear()
    assert manager.drain_events() == []


@pytest.mark.parametrize("host", [0, 3])
def test_who_listens_late_is_told_what_is_cached_parents_first(host: int) -> None:
    manager = BlockManager(7, B, host=HostTier(host) if host else None, hash_seed=1)
    for number in range(6):
        seq = run(manager, number, [number % 2] * B + [number] * 9)
        tell(seq, 1)
        step(manager)
    manager.collect_events = True
    known: Known = Counter()
    seen: set[bytes] = set()
    snapshot = manager.cached_blocks()
    for event in snapshot:
        assert event.parent_hash in seen | {b""} or (event.parent_hash, 0) not in cached(manager)
        seen.add(event.hash)
    follow(known, snapshot)
    assert known == cached(manager)
    assert +known
    run(manager, 9, [9] * 13)
    follow(known, manager.drain_events())
    assert known == cached(manager)


@pytest.mark.parametrize("host", [0, 2])
@pytest.mark.parametrize("with_disk", [False, True])
def test_a_listener_always_knows_what_is_cached(host: int, with_disk: bool, tmp_path: Path) -> None:
    manager = listened(6, host, tmp_path if with_disk and host else None)
    draw = random.Random(0)
    known: Known = Counter()
    for seq_id in range(300):
        prompt = [draw.randint(0, 1)] * draw.randint(1, 3 * B) + [2] * draw.randint(0, 2 * B)
        seq = make_sequence(seq_id, prompt)
        if manager.fetch(seq):
            settle(manager, "damaged" if draw.random() < 0.2 else None)
        if manager.admit(seq) is None:
            manager.cancel_fetch(seq)
            continue
        seq.num_computed_tokens = seq.num_tokens
        manager.publish(seq, seq.num_tokens, committed=False)
        chance = draw.random()
        if chance < 0.2:
            manager.take_orders()
            manager.rollback([seq], [seq])
            manager.discard(seq)
        else:
            settle(manager)
            (manager.condemn if chance < 0.3 else manager.swap_out if chance < 0.5 else manager.free)(seq)
        if draw.random() < 0.02:
            assert manager.reset_prefix_cache()
        follow(known, manager.drain_events())
        assert known == cached(manager)
        manager.check()
