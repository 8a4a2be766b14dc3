"""From what was recorded to the figures that are reported. A name ends in its unit; `share` is of 1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.drive import Kind, RequestTimes, Run, Step
from benchmarks.limit import Ceiling, ModelLimit

Figures = dict[str, float]

HIGHER_IS_BETTER = (
    "tok_s",
    "req_s",
    "gb_s",
    "tflop_s",
    "limit_share",
    "tok_s_share",
    "ms_share",
    "fair_share",
)


def higher_is_better(name: str) -> bool:
    """Which way a figure gets better: rates and shares of the limit go up; times, waste and overheads go down."""
    base = name.rsplit("_p", 1)[0] if name[-2:].isdigit() else name.removesuffix("_mean")
    return base.endswith(HIGHER_IS_BETTER)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range over repetitions."""
    figures = {"median": float(np.median(values)), "min": min(values), "max": max(values)}
    return {key: float(f"{value:.6g}") for key, value in figures.items()} | {"repetitions": len(values)}


def percentiles(name: str, values: Sequence[float], *, detailed: bool = False) -> Figures:
    """The median under the plain name; `detailed` adds mean, p90 and p99. Nothing for no values."""
    if not values:
        return {}
    figures = {name: float(np.median(values))}
    if detailed:
        figures[f"{name}_mean"] = float(np.mean(values))
        figures |= {f"{name}_p{p}": float(np.percentile(values, p)) for p in (90, 99)}
    return figures


def latency_figures(requests: Iterable[RequestTimes]) -> Figures:
    """TTFT and TPOT over requests, ITL over all gaps between tokens of a request; milliseconds."""
    requests = list(requests)
    columns = {
        "ttft_ms": [1000 * request.ttft for request in requests],
        "tpot_ms": [1000 * request.tpot for request in requests if request.tpot is not None],
        "itl_ms": [1000 * gap for request in requests for gap in request.itls],
    }
    return {name: value for column, values in columns.items() for name, value in percentiles(column, values).items()}


def stream_figures(run: Run) -> Figures:
    """Those of single streams: the longest gaps between tokens, too."""
    gaps = [1000 * gap for request in run.requests for gap in request.itls]
    return latency_figures(run.requests) | ({"itl_ms_p99": float(np.percentile(gaps, 99))} if gaps else {})


def step_figures(all_steps: Sequence[Step], limit: ModelLimit, ceiling: Ceiling) -> Figures:
    """Where the time of the engine went: tokens computed per second in steps of each kind, how near they came to the limit of
    steps of their own size, and the share of the time spent outside the model (schedule, update, detokenize)."""
    figures: Figures = {}
    for kind in Kind:
        steps = [step for step in all_steps if step.kind is kind]
        if steps:
            seconds = _seconds(steps)
            figures[f"{kind.value}_tok_s"] = sum(step.work.num_tokens for step in steps) / seconds
            least = sum(limit.seconds(step.work, ceiling) for step in steps)
            figures[f"{kind.value}_limit_share"] = least / seconds
    figures["host_time_share"] = 1 - sum(step.model_seconds for step in all_steps) / _seconds(all_steps)
    return figures


def _seconds(steps: Sequence[Step]) -> float:
    return sum(step.end - step.start for step in steps)
