from __future__ import annotations

from copy import copy

from nanoengine.engine.messages import Phase
from nanoengine.engine.stats import EngineStats


def test_rates_of_an_idle_engine_are_zero() -> None:
    assert (EngineStats().prefill_rate, EngineStats().decode_rate) == (0.0, 0.0)


def test_prefill_and_decode_are_counted_apart() -> None:
    stats = EngineStats()
    stats.record(Phase.PREFILL, 100, 2.0)
    stats.record(Phase.DECODE, 6, 0.5)
    stats.record(Phase.DECODE, 4, 0.5)
    assert stats.num_decode_steps == 2
    assert (stats.prefill_tokens, stats.prefill_time, stats.prefill_rate) == (100, 2.0, 50.0)
    assert (stats.decode_tokens, stats.decode_time, stats.decode_rate) == (10, 1.0, 10.0)


def test_a_step_that_takes_no_time_does_not_divide_by_zero() -> None:
    stats = EngineStats()
    stats.record(Phase.PREFILL, 5, 0.0)
    assert stats.prefill_rate == 0.0


def test_rates_may_be_those_since_an_earlier_moment() -> None:
    stats = EngineStats()
    stats.record(Phase.PREFILL, 100, 2.0)
    stats.record(Phase.DECODE, 6, 0.5)
    before = copy(stats)
    stats.record(Phase.DECODE, 9, 1.0)
    since = stats.since(before)
    assert since == EngineStats(decode_tokens=9, decode_time=1.0, num_decode_steps=1)
    assert (since.prefill_rate, since.decode_rate) == (0.0, 9.0)
