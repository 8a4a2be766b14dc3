"""Each mode's plot is drawn by the tests of the modes; here is what the pictures hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots
from benchmarks.drive import Kind, Step
from benchmarks.limit import StepWork
from benchmarks.report import Report


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were drawn, kept open to be looked at."""
    from matplotlib import pyplot

    kept: list[Any] = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    return kept


def facts(**arguments: Any) -> dict[str, Any]:
    return {"arguments": arguments, "cpu": "a chip", "date": "2026-11-21"}


def test_a_sweep_is_drawn_over_its_rates(tmp_path: Path, figures: list[Any]) -> None:
    report = Report("serve", facts(model="demo"))
    for rate, speed in ((4.0, 100.0), (2.0, 50.0), (8.0, 130.0)):
        report.add({"rate": rate}, {"output_tok_s": speed, "ttft_ms": 1000 / speed, "ttft_ms_p99": 5000 / speed})
        report.sample("ttft_ms", f"{rate}", [1.0, 2.0, 3.0])
    plots.plot(report, tmp_path / "serve.png")
    throughput, ttft, distribution = figures[0].axes
    assert throughput.get_ylabel() == "output_tok_s"
    assert throughput.containers[0][0].get_xydata().tolist() == [[2.0, 50.0], [4.0, 100.0], [8.0, 130.0]]
    assert [container.get_label() for container in ttft.containers][1] == "p99"
    assert len(distribution.lines) == 3
    assert "demo" in figures[0].get_suptitle()


def test_a_timeline_shows_kinds_of_steps_waiting_use_and_preemptions(tmp_path: Path, figures: list[Any]) -> None:
    report = Report("throughput", facts(model="demo"))
    report.add({"num_seqs": 3}, {"output_tok_s": 9.0})
    report.add({"num_seqs": 3}, {"output_tok_s": 3.0}, "peer")
    work = StepWork(1, 1, 1, 1)
    report.timeline = [
        Step(0.0, 0.4, 0.3, Kind.PREFILL, 3, 2, work, kv_usage=0.5, num_preemptions=0),
        Step(0.4, 0.5, 0.1, Kind.DECODE, 5, 0, work, kv_usage=0.75, num_preemptions=1),
        Step(0.5, 0.7, 0.2, Kind.MIXED, 6, 0, work, kv_usage=0.8, num_preemptions=1),
        Step(0.7, 0.8, 0.1, None, 0, 1, work, kv_usage=0.8, num_preemptions=1),
    ]
    plots.plot(report, tmp_path / "throughput.png")
    bars, batch, pool, preemptions = (axis for axis in figures[0].axes if axis.axison)
    assert sorted(bar.get_width() for bar in bars.patches) == [3.0, 9.0]
    assert [bar.get_height() for bar in batch.patches] == [3, 5, 6]
    assert [bar.get_x() for bar in batch.patches] == [0.0, 0.4, 0.5]
    assert len({bar.get_facecolor() for bar in batch.patches}) == 3, "each kind has its colour"
    assert pool.lines[0].get_ydata().tolist() == [50.0, 75.0, 80.0, 80.0]
    assert preemptions.lines[0].get_ydata().tolist() == [0, 1, 1, 1]


def test_nothing_to_draw_is_no_picture(tmp_path: Path) -> None:
    plots.plot(Report("throughput", facts()), tmp_path / "nothing.png")
    assert not (tmp_path / "nothing.png").exists()
