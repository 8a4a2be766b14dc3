"""The table of targets, from saved reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.gpu import targets as gpu_targets
from benchmarks.gpu.targets import TARGETS, Target
from benchmarks.report import Report

SHARE = Target("share", {"work": "a"}, "share", 0.7, "%")
TIME = Target("time", {"work": "a", "mode": "fast"}, "ms", 8.0, "ms", at_most=True)


def reports(share: float, ms: float) -> list[dict[str, object]]:
    report = Report("some")
    report.add({"work": "a", "mode": "slow"}, {"ms": 1000.0})
    report.add({"work": "a", "mode": "fast"}, {"ms": ms, "share": share})
    report.add({"work": "a", "mode": "fast"}, {"ms": ms + 2, "share": share})
    return [Report("empty").as_json(), report.as_json()]


@pytest.mark.parametrize(
    ("share", "ms", "verdicts"),
    [(0.7, 7.0, ("met", "met")), (0.699, 7.1, ("missed", "missed")), (0.71, 9, ("met", "missed"))],
)
def test_medians_are_compared_with_the_goals(share: float, ms: float, verdicts: tuple[str, str]) -> None:
    _, *lines = gpu_targets.lines(reports(share, ms), [SHARE, TIME])
    assert tuple(line.split()[-1] for line in lines) == verdicts
    assert f"{100 * share:.1f} %" in lines[0]
    assert f"{ms + 1:.4g} ms" in lines[1]


def test_what_was_not_measured_is_not_run_and_what_has_no_goal_is_only_shown() -> None:
    assert all(line.endswith("-  not run") for line in gpu_targets.lines([])[1:])
    assert len(gpu_targets.lines([])) == 1 + len(TARGETS)
    [_, line] = gpu_targets.lines(reports(0.5, 7.0), [replace(TIME, goal=None)])
    assert line.split() == ["time", "-", "8", "ms"]
