from __future__ import annotations

import pytest

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.kv.statistics import WINDOW, CacheStats
from nanoengine.engine.messages import Tier
from tests.engine.kv.toys import ToySequence, again, evict, make_sequence, start, step, tell


def run(manager: BlockManager, seq_id: int, prompt: list[int], **options: object) -> ToySequence:
    """Admit a sequence and compute its prompt."""
    seq = start(manager, seq_id, prompt, **options)
    step(manager)
    return seq


def test_nobody_asked_is_not_the_same_as_nothing_found() -> None:
    stats = CacheStats()
    assert (stats.hit_rate, stats.recent_hit_rate) == (None, None)
    stats.record(10, 0, resumed=False)
    assert (stats.hit_rate, stats.recent_hit_rate) == (0.0, 0.0)


def test_with_caching_off_nothing_is_asked() -> None:
    manager = BlockManager(10, 4, enable_prefix_caching=False)
    for seq_id in range(3):
        manager.free(run(manager, seq_id, [1] * 9))
    assert manager.stats.num_queried_tokens == 0
    assert manager.stats.hit_rate is None


def test_a_sequence_that_must_not_read_the_cache_does_not_ask() -> None:
    manager = BlockManager(10, 4)
    manager.free(run(manager, 0, [1] * 9))
    manager.free(run(manager, 1, [1] * 9, reads_cache=False))
    assert manager.stats.num_queried_tokens == 9


def test_rates_weigh_requests_by_their_tokens() -> None:
    stats = CacheStats()
    stats.record(90, 0, resumed=False)
    stats.record(10, 10, resumed=False)
    assert stats.hit_rate == stats.recent_hit_rate == pytest.approx(0.1)


def test_what_resumes_counts_apart() -> None:
    stats = CacheStats()
    stats.record(10, 0, resumed=False)
    stats.record(12, 8, resumed=True)
    assert (stats.num_queried_tokens, stats.num_hit_tokens) == (10, 0)
    assert (stats.num_resumed_queried_tokens, stats.num_resumed_hit_tokens) == (12, 8)
    assert stats.hit_rate == stats.recent_hit_rate == 0.0


def test_the_recent_rate_forgets_what_is_longer_ago_than_its_window() -> None:
    stats = CacheStats()
    for _ in range(WINDOW):
        stats.record(4, 0, resumed=False)
    for i in range(WINDOW):
        stats.record(4, 4, resumed=False)
        assert stats.recent_hit_rate == pytest.approx((i + 1) / WINDOW)
    assert stats.hit_rate == 0.5


def test_two_statistics_share_nothing() -> None:
    one, other = CacheStats(), CacheStats()
    one.record(4, 4, resumed=False)
    one.hits_by_tier[Tier.HOST] += 4
    assert (other.num_queried_tokens, other.recent_hit_rate, other.hits_by_tier[Tier.HOST]) == (0, None, 0)


def test_hits_are_told_apart_by_the_tier_that_had_them() -> None:
    manager = BlockManager(4, 4, host=HostTier(2))
    first = run(manager, 0, [1] * 8 + [2])
    manager.swap_out(first)
    step(manager)
    evict(manager, 3)  # the two empty blocks, and the second one: that is in host memory only
    second = run(manager, 1, [1] * 8 + [2])
    assert second.num_cached_tokens == 8
    tiers = manager.stats.hits_by_tier
    assert tiers[Tier.DEVICE] + tiers[Tier.HOST] == 8
    assert tiers[Tier.HOST] >= 4
    assert tiers[Tier.DISK] == 0


def test_an_admission_that_fails_is_not_counted() -> None:
    manager = BlockManager(3, 4)
    run(manager, 0, [1] * 5)
    assert manager.admit(make_sequence(1, [1] * 12)) is None
    assert (manager.stats.num_queried_tokens, manager.stats.num_hit_tokens) == (5, 0)
    assert manager.stats.hits_by_tier[Tier.DEVICE] == 0


def test_a_request_counts_once_however_often_it_is_preempted() -> None:
    manager = BlockManager(6, 4)
    seq = run(manager, 0, [1] * 9)
    for count in range(3):
        assert (manager.stats.num_queried_tokens, manager.stats.num_hit_tokens) == (9, 0)
        assert manager.stats.num_resumed_queried_tokens == 9 * count
        manager.free(seq)
        seq.num_computed_tokens = 0
        again(manager, seq)
        step(manager)


def test_copies_on_write_are_counted() -> None:
    manager = BlockManager(6, 4)
    parent = run(manager, 0, [1] * 5)
    child = make_sequence(1, [1] * 5)
    child.num_computed_tokens = 5
    manager.fork(parent, child)
    for seq in (parent, child):
        tell(seq, 3)
        assert manager.allocate_slots(seq) is not None
    assert manager.stats.num_copied_blocks == 1
