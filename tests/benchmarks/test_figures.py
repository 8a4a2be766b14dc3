"""Figures of made-up runs."""

from __future__ import annotations

import pytest

from benchmarks.drive import Kind, RequestTimes, Run, Step
from benchmarks.figures import latency_figures, percentiles, spread, step_figures, stream_figures
from benchmarks.interference import interference_figures, stalls
from benchmarks.limit import Ceiling, ModelLimit, StepWork
from tests.support import QWEN3_06B


def test_spread_and_percentiles() -> None:
    assert spread([3.0, 1.0, 8.0]) == {"median": 3.0, "min": 1.0, "max": 8.0, "repetitions": 3}
    values = [float(i) for i in range(1, 102)]
    assert percentiles("x", values) == {"x": 51.0}
    assert percentiles("x", values, detailed=True) == {"x": 51.0, "x_mean": 51.0, "x_p90": 91.0, "x_p99": 100.0}
    assert percentiles("x", []) == {}


def test_latencies_over_requests_and_gaps() -> None:
    requests = [
        RequestTimes(0.0, token_times=[0.1, 0.2, 0.5]),
        RequestTimes(1.0, token_times=[1.3, 1.4]),
        RequestTimes(1.0, token_times=[1.5]),
    ]
    figures = latency_figures(requests)
    assert figures["ttft_ms"] == pytest.approx(300)
    assert figures["tpot_ms"] == pytest.approx(150), "the median of 200 and 100: a single token has none"
    assert figures["itl_ms"] == pytest.approx(100), "of 100, 300, 100"
    assert stream_figures(Run(requests))["itl_ms_p99"] == pytest.approx(296)
    assert stream_figures(Run(requests[2:])) == {"ttft_ms": pytest.approx(500)}


LIMIT, CEILING = ModelLimit(QWEN3_06B, 2, QWEN3_06B.kv_bytes_per_token(2)), Ceiling(1e10, 1e12)


def make_step(kind: Kind | None, start: float, end: float, model: float, work: StepWork) -> Step:
    return Step(start, end, model, kind, 1, work)


def test_where_the_time_went() -> None:
    prefill, decode, mixed = StepWork(100, 1, 100, 5050), StepWork(4, 4, 400, 400), StepWork(104, 5, 504, 5454)
    steps = [
        make_step(Kind.PREFILL, 0.0, 0.5, 0.4, prefill),
        make_step(Kind.DECODE, 0.5, 0.7, 0.15, decode),
        make_step(Kind.DECODE, 1.0, 1.2, 0.15, decode),  # the wait before it is nobody's
        make_step(None, 1.2, 1.3, 0.1, StepWork(0, 0, 0, 0)),  # copies of blocks: time, but no tokens
    ]
    figures = step_figures(steps, LIMIT, CEILING)
    assert figures["prefill_tok_s"] == pytest.approx(200)
    assert figures["decode_tok_s"] == pytest.approx(20)
    assert figures["prefill_limit_share"] == pytest.approx(LIMIT.seconds(prefill, CEILING) / 0.5)
    assert figures["decode_limit_share"] == pytest.approx(2 * LIMIT.seconds(decode, CEILING) / 0.4)
    assert figures["host_time_share"] == pytest.approx(1 - 0.8 / 1.0)
    assert not any(name.startswith("mixed") for name in figures), "there was none"
    figures = step_figures([*steps, make_step(Kind.MIXED, 1.3, 1.7, 0.4, mixed)], LIMIT, CEILING)
    assert figures["mixed_tok_s"] == pytest.approx(260)
    assert figures["mixed_limit_share"] == pytest.approx(LIMIT.seconds(mixed, CEILING) / 0.4)


# ---- streams beside prompts


def step(kind: Kind, num_seqs: int, seconds: float) -> Step:
    return Step(0.0, seconds, 0.0, kind, num_seqs, StepWork(1, 1, 1, 1))


def stream(*times: float) -> RequestTimes:
    return RequestTimes(0.0, token_times=list(times))


def prompt(due: float, first: float) -> RequestTimes:
    return RequestTimes(due, token_times=[first])


def test_gaps_count_where_a_prompt_waited_in_them() -> None:
    # The first prompt is due within a gap and holds the stream up; between 5 and 6 nobody waits.
    run = Run([stream(1, 2, 5, 6, 7, 9), prompt(due=1.5, first=4.5), prompt(due=6.5, first=8)])
    assert stalls(run, num_streams=1) == [1000, 3000, 1000, 2000]
    assert stalls(Run([stream(1, 2), prompt(due=2, first=3)]), num_streams=1) == [], "it came when the gap was over"


def test_streams_are_compared_with_themselves_alone() -> None:
    run = Run([stream(1, 2, 5, 6), stream(1, 2, 5, 6), prompt(1.5, 4.5), prompt(2.5, 5.5)])
    run.steps = [
        *[step(Kind.DECODE, 2, seconds) for seconds in (0.5, 0.25, 4.0)],
        *[step(Kind.DECODE, 1, 9.0)] * 3,  # not all streams
        *[step(Kind.MIXED, 3, 9.0), step(Kind.PREFILL, 1, 9.0)] * 3,
    ]
    figures = interference_figures(run, num_streams=2)
    expected = {"alone_ms": 500, "itl_ms": 1000, "itl_ms_max": 3000, "slowdown": 2, "slowdown_max": 6, "ttft_ms": 3000}
    assert {name: figures[name] for name in expected} == expected
    assert figures["slowdown_p99"] == pytest.approx(figures["itl_ms_p99"] / 500)
