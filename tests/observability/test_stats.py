"""EngineStats and CacheStats: the counts of steps, and of the prefix cache."""

from __future__ import annotations

from copy import copy

import pytest

from nanoengine.observability.metrics import WINDOW, CacheStats, EngineStats


def test_prefill_and_decode_are_counted_apart_and_rates_may_be_those_since_a_moment() -> None:
    stats = EngineStats()
    stats.record(0, 0, 0, 3.0)
    assert (stats, stats.prefill_rate, stats.decode_rate) == (EngineStats(), 0.0, 0.0), "no tokens, no step"
    stats.record(100, 0, 0, 2.0)
    stats.record(0, 6, 6, 0.5)
    before = copy(stats)
    stats.record(0, 4, 4, 0.5)
    assert (stats.num_prefill_steps, stats.num_mixed_steps, stats.num_decode_steps) == (1, 0, 2)
    assert (stats.prefill_tokens, stats.prefill_time, stats.prefill_rate) == (100, 2.0, 50.0)
    assert (stats.decode_tokens, stats.decode_time, stats.decode_rate) == (10, 1.0, 10.0)
    since = stats.since(before)
    assert since == EngineStats(decode_tokens=4, decode_time=0.5, num_decode_steps=1)
    assert (since.prefill_rate, since.decode_rate) == (0.0, 8.0)


def test_the_time_of_a_mixed_step_is_shared_out_by_its_tokens_drafts_included() -> None:
    stats = EngineStats()
    stats.record(3, 11, 9, 7.0)
    assert (stats.decode_tokens, stats.decode_time) == (9, 5.5)
    assert (stats.prefill_tokens, stats.prefill_time) == (3, 1.5)
    assert stats.num_mixed_steps == 1


def test_nobody_asked_is_not_the_same_as_nothing_found() -> None:
    stats = CacheStats()
    assert (stats.hit_rate, stats.recent_hit_rate) == (None, None)
    stats.record(90, 0, resumed=False)
    stats.record(10, 10, resumed=False)
    assert stats.hit_rate == stats.recent_hit_rate == pytest.approx(0.1)


def test_the_recent_rate_forgets() -> None:
    stats = CacheStats()
    for _ in range(WINDOW):
        stats.record(4, 0, resumed=False)
    for i in range(WINDOW):
        stats.record(4, 4, resumed=False)
        assert stats.recent_hit_rate == pytest.approx((i + 1) / WINDOW)
    assert stats.hit_rate == 0.5
