"""What a GPU's profile is boiled down to."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.trace import Activity, Busy, busy, read_trace


def test_kernels_side_by_side_count_once() -> None:
    activities = [Activity("a", 0, 40), Activity("b", 20, 60), Activity("c", 62, 80), Activity("d", 90, 100)]
    spent = busy(activities, long_gap=5)
    assert spent == pytest.approx(Busy(100e-6, 0.88, 0.02, 0.1))
    assert sum(spent[1:]) == pytest.approx(1)


def test_what_is_read_of_a_trace() -> None:
    def event(name: str, category: str, start: float, seconds: float | None = 1.0, phase: str = "X") -> dict[str, Any]:
        return {"name": name, "cat": category, "ph": phase, "ts": start} | ({"dur": seconds} if seconds else {})

    events = [
        event("cudaLaunchKernel", "cuda_runtime", 1),
        event("decode", "kernel", 9, 2.5),
        event("copy", "gpu_memcpy", 3),
        event("zero", "gpu_memset", 6),
        event("decode", "ac2g", 9, None, "f"),
        event("a step", "gpu_user_annotation", 0, 100),
        {"name": "process_name", "ph": "M"},
    ]
    found = read_trace({"traceEvents": events})
    assert found == [Activity("copy", 3, 4), Activity("zero", 6, 7), Activity("decode", 9, 11.5)]
