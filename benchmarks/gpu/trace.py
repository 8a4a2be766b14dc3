"""What a profile says of a GPU: how much of the time it was busy, how long it was idle at a time, and with which kernels.

It reads the trace that torch.profiler exports, and knows nothing of engines.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

from benchmarks.spans import merge

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of the trace's events that keep a GPU busy."""

LONG_GAP = 5.0
"""Microseconds. Kernels of one CUDA graph follow each other faster; in longer gaps the device waits for the host."""


class Activity(NamedTuple):
    """Something that a GPU did; times in microseconds."""

    name: str
    start: float
    end: float


class Busy(NamedTuple):
    """How the time from the first activity to the end of the last one was spent."""

    seconds: float  # all of it
    busy_share: float
    short_gap_share: float  # idle, but not for long
    long_gap_share: float  # idle, as if it waited for the host


class Kernel(NamedTuple):
    """All activities of one name."""

    name: str
    seconds: float
    calls: int


def record(work: Callable[[], object], watched: ProfilerActivity = ProfilerActivity.CUDA) -> list[Activity]:
    """What the GPU does while `work` is done; it must have waited for the device before it returns."""
    with profile(activities=[watched]) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text()))


def read_trace(trace: Mapping[str, Any]) -> list[Activity]:
    """The activities of a GPU in a trace in Chrome's format, in the order in which they began."""
    events = (event for event in trace["traceEvents"] if event.get("cat") in ON_DEVICE and event.get("ph") == "X")
    activities = (Activity(e["name"], float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events)
    return sorted(activities, key=lambda activity: activity.start)


def busy(activities: Sequence[Activity], long_gap: float = LONG_GAP) -> Busy:
    """How the time between the beginning and the end of these was spent."""
    merged = merge((activity.start, activity.end) for activity in activities)
    total = merged[-1][1] - merged[0][0] if merged else 0.0
    if total <= 0:
        return Busy(0.0, 0.0, 0.0, 0.0)
    gaps = [after[0] - before[1] for before, after in pairwise(merged)]
    long = sum(gap for gap in gaps if gap > long_gap) / total
    short = sum(gap for gap in gaps if gap <= long_gap) / total
    return Busy(total / 1e6, sum(end - start for start, end in merged) / total, short, long)


def by_kernel(activities: Iterable[Activity]) -> list[Kernel]:
    """Seconds and number of the activities of each name, the costliest first."""
    seconds: dict[str, list[float]] = {}
    for activity in activities:
        seconds.setdefault(activity.name, []).append((activity.end - activity.start) / 1e6)
    kernels = (Kernel(name, sum(values), len(values)) for name, values in seconds.items())
    return sorted(kernels, key=lambda kernel: -kernel.seconds)
