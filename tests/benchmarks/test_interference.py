"""What is said of streams beside prompts, from made-up runs."""

from __future__ import annotations

import pytest

from benchmarks.drive import Kind, RequestTimes, Run, Step
from benchmarks.interference import interference_figures, stalls
from benchmarks.limit import StepWork


def step(kind: Kind, num_seqs: int, seconds: float) -> Step:
    return Step(0.0, seconds, 0.0, kind, num_seqs, 0, StepWork(1, 1, 1, 1), 0.0, 0)


def stream(*times: float) -> RequestTimes:
    return RequestTimes(0.0, 4, token_times=list(times))


def prompt(due: float, first: float, num_tokens: int = 100) -> RequestTimes:
    return RequestTimes(due, num_tokens, token_times=[first])


def test_gaps_count_where_a_prompt_waited_in_them() -> None:
    # The first prompt is due within a gap and holds the stream up; between 5 and 6 nobody waits.
    run = Run([stream(1, 2, 5, 6, 7, 9), prompt(due=1.5, first=4.5), prompt(due=6.5, first=8)])
    assert stalls(run, num_streams=1) == [1000, 3000, 1000, 2000]
    assert stalls(Run([stream(1, 2), prompt(due=2, first=3)]), num_streams=1) == [], "it came when the gap was over"


def test_streams_are_compared_with_themselves_alone() -> None:
    run = Run([stream(1, 2, 5, 6), stream(1, 2, 5, 6), prompt(1.5, 4.5, 100), prompt(2.5, 5.5, 300)])
    run.steps = [
        *[step(Kind.DECODE, 2, seconds) for seconds in (0.5, 0.25, 4.0)],
        *[step(Kind.DECODE, 1, 9.0)] * 3,  # not all streams
        *[step(Kind.MIXED, 3, 9.0), step(Kind.PREFILL, 1, 9.0)] * 3,
    ]
    figures = interference_figures(run, num_streams=2)
    expected = {"alone_ms": 500, "itl_ms": 1000, "itl_ms_max": 3000, "slowdown": 2, "slowdown_max": 6, "ttft_ms": 3000}
    assert {name: figures[name] for name in expected} == expected
    assert figures["slowdown_p99"] == pytest.approx(figures["itl_ms_p99"] / 500)
    # Somebody waits from 1.5 to 5.5: the prompts wait side by side. Each stream gets two tokens in that time.
    assert figures["output_tok_s"] == pytest.approx(2 * 2 / 4)
    assert figures["prompt_tok_s"] == pytest.approx(400 / 4)
