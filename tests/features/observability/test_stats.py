"""EngineStats and CacheStats: the counts of steps, and of the prefix cache."""

from __future__ import annotations

from copy import copy

import pytest

from nanoengine.features.kv_offload.offload import OffloadStats
from nanoengine.features.observability.metrics import CacheStats, EngineStats
from nanoengine.features.speculation.statistics import SpeculationStats

from .toys import Observed


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


def test_counters_of_two_engines_are_added() -> None:
    one, two = Observed(num_blocks=100), Observed(num_blocks=300)
    one.sources["speculation"] = lambda: SpeculationStats(num_runs=3, tried_at=[3, 2], accepted_at=[1, 0])
    two.sources["speculation"] = lambda: SpeculationStats(num_runs=4, tried_at=[4], accepted_at=[2])
    one.sources["offload"] = two.sources["offload"] = lambda: OffloadStats(1, 2, 3, 4, 5)
    one.add([1, 2, 3], 5)
    two.add([4] * 9, 3)
    two.add([4] * 9, 7)
    for own in (one, two):
        own.engine.step()
    first, second = one.snapshot(), two.snapshot()
    both = first + second
    assert both.kv_usage == pytest.approx((first.kv_usage * 100 + second.kv_usage * 300) / 400)
    assert both.kv_usage > 0.0
    assert both.num_running == first.num_running + second.num_running > first.num_running
    assert (both.num_blocks, both.block_size, both.max_model_len) == (400, 4, 60)
    assert both.max_concurrency == first.max_concurrency + second.max_concurrency
    past = second.after_end()
    assert (past.num_running, past.kv_usage, past.num_blocks, past.max_concurrency) == (0, 0.0, 0, 0.0)
    assert (past.num_requests, past.steps) == (2, second.steps)
    for own in (one, two):
        while own.engine.has_unfinished:
            own.engine.step()
    both = one.snapshot() + two.snapshot()
    assert (both.num_requests, both.finished["length"]) == (3, 3)
    assert both.steps.decode_tokens == one.snapshot().steps.decode_tokens + two.snapshot().steps.decode_tokens
    assert both.cache == CacheStats(21, 8)
    assert (both.times.num_generated_tokens, both.times.generated_length.count) == (15, 3)
    assert both.times.generated_length.sum == 15.0
    assert sum(both.times.generated_length.counts) == 3
    drafts = SpeculationStats(num_runs=7, tried_at=[7, 2], accepted_at=[3, 0])
    assert (both.speculation, both.offload) == (drafts, OffloadStats(2, 4, 6, 8, 10))
