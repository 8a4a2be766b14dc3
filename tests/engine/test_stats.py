from __future__ import annotations

from nanoengine.engine.messages import Phase
from nanoengine.engine.stats import EngineStats


def test_rates_of_an_idle_engine_are_zero() -> None:
    assert (EngineStats().prefill_rate, EngineStats().decode_rate) == (0.0, 0.0)


def test_prefill_and_decode_are_counted_apart() -> None:
    stats = EngineStats()
    stats.record(Phase.PREFILL, 100, 2.0)
    stats.record(Phase.DECODE, 6, 0.5)
    stats.record(Phase.DECODE, 4, 0.5)
    assert (stats.num_prefill_steps, stats.num_decode_steps) == (1, 2)
    assert (stats.prefill_tokens, stats.prefill_time, stats.prefill_rate) == (100, 2.0, 50.0)
    assert (stats.decode_tokens, stats.decode_time, stats.decode_rate) == (10, 1.0, 10.0)


def test_a_step_that_takes_no_time_does_not_divide_by_zero() -> None:
    stats = EngineStats()
    stats.record(Phase.PREFILL, 5, 0.0)
    assert stats.prefill_rate == 0.0
