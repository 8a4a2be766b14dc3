from __future__ import annotations

import pytest

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.kv.statistics import WINDOW, CacheStats
from nanoengine.engine.kv.tiers import LowerTiers
from nanoengine.engine.messages import Tier
from nanoengine.engine.sequence import Sequence
from tests.engine.toys import ToyModel, add, drain, make_scheduler, make_sequence, tell


def run(manager: BlockManager, seq: Sequence) -> Sequence:
    """Admit a sequence and compute its prompt."""
    cached = manager.admit(seq)
    assert cached is not None
    seq.num_cached_tokens = cached
    seq.num_computed_tokens = seq.num_tokens
    manager.publish(seq, seq.num_tokens)
    manager.take_transfers()
    manager.commit()
    return seq


def test_nothing_asked_is_a_rate_of_zero() -> None:
    assert CacheStats().hit_rate == 0.0
    assert CacheStats().recent_hit_rate == 0.0


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
    assert (other.num_queried_tokens, other.recent_hit_rate, other.hits_by_tier[Tier.HOST]) == (0, 0.0, 0)


def test_hits_are_told_apart_by_the_tier_that_had_them() -> None:
    manager = BlockManager(4, 4, tiers=LowerTiers(HostTier(2)))
    first = run(manager, make_sequence(0, [1] * 8 + [2]))
    manager.swap_out(first)
    for block in manager.pool.allocate(2):  # the unused block, and the tail: the second block is in host memory only
        manager.pool.release([block])
    manager.pool.release(manager.pool.allocate(1))
    second = run(manager, make_sequence(1, [1] * 8 + [2]))
    assert second.num_cached_tokens == 8
    tiers = manager.stats.hits_by_tier
    assert tiers[Tier.DEVICE] + tiers[Tier.HOST] == 8
    assert tiers[Tier.HOST] >= 4
    assert tiers[Tier.DISK] == 0


def test_an_admission_that_fails_is_not_counted() -> None:
    manager = BlockManager(3, 4)
    run(manager, make_sequence(0, [1] * 5))
    assert manager.admit(make_sequence(1, [1] * 12)) is None
    assert (manager.stats.num_queried_tokens, manager.stats.num_hit_tokens) == (5, 0)
    assert manager.stats.hits_by_tier[Tier.DEVICE] == 0


def test_a_request_counts_once_however_often_it_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=24)
    seqs = add(scheduler, 6, 6, 6, max_tokens=12)
    drain(scheduler, ToyModel())
    stats = scheduler.block_manager.stats
    assert scheduler.num_preemptions > 0
    assert stats.num_queried_tokens == sum(seq.num_prompt_tokens for seq in seqs)
    assert stats.num_hit_tokens == 0
    assert stats.num_resumed_queried_tokens > scheduler.num_preemptions * 6


def test_copies_on_write_are_counted() -> None:
    manager = BlockManager(6, 4)
    parent = run(manager, make_sequence(0, [1] * 5))
    child = make_sequence(1, [1] * 5)
    child.num_computed_tokens = 5
    manager.fork(parent, child)
    for seq in (parent, child):
        tell(seq, 3)
        assert manager.allocate_slots(seq)
    assert manager.stats.num_copied_blocks == 1
