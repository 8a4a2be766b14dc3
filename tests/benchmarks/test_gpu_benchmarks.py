"""What the GPU benchmarks say, and how they go on after a failure: from saved reports and made-up traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.modes import FASTEST, Mode, modes_of, running_in
from benchmarks.gpu.parts import kept_going
from benchmarks.gpu.table import LINES, Line
from benchmarks.gpu.trace import Activity, Busy, busy, read_trace
from benchmarks.report import Report
from benchmarks.session import runner_of
from nanoengine import LLM, SamplingParams

ROOT = Path(__file__).parent.parent.parent


def test_the_lines_ask_for_rows_that_the_benchmarks_make() -> None:
    """Their words are the same in both places; a misspelled one would stay empty for ever."""
    names = ["gpu/engine", "gpu/decode", "figures"]
    sources = "".join((ROOT / "benchmarks" / f"{name}.py").read_text() for name in names)
    stages = (ROOT / "benchmarks" / "gpu.sh").read_text()
    for line in LINES:
        for word in (line.figure, *line.case, *line.case.values()):
            assert f'"{word}"' in sources, word
        assert all(not stage or f"engine {stage} " in stages for stage in line.stages)


def test_a_part_that_fails_is_reported_and_ctrl_c_is_not_swallowed(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("some")
    with kept_going(report, "the first"):
        raise RuntimeError("out of memory")
    assert report.facts["failed"] == ["the first"]
    assert report.warnings == ["the first failed: RuntimeError: out of memory"]
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt), kept_going(report, "the second"):
        raise KeyboardInterrupt


def test_an_engine_runs_in_another_mode_and_back(tiny_llm: LLM) -> None:
    engine, runner = tiny_llm.engine, runner_of(tiny_llm)
    assert modes_of(tiny_llm) == [Mode(True, False), Mode(False, False)]
    recorded: Any = object()
    runner.recorder = recorded
    assert modes_of(tiny_llm)[0] == FASTEST
    with running_in(tiny_llm, Mode(overlap=True, graphs=False)):
        assert (engine.depth, runner.recorder) == (2, None)
        tokens = tiny_llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=5), use_tqdm=False)
    assert (engine.depth, runner.recorder) == (1, recorded)
    runner.recorder = None
    again = tiny_llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=5), use_tqdm=False)
    assert again[0].outputs[0].token_ids == tokens[0].outputs[0].token_ids


SHARE = Line("share", {"work": "a"}, "share", "%", 0.7)
TIME = Line("time", {"work": "a", "mode": "fast"}, "ms", "ms", 8.0, True)


def report(share: float, ms: float) -> dict[str, Any]:
    report = Report("some")
    report.add({"work": "a", "mode": "slow"}, {"ms": 1000.0})
    report.add({"work": "a", "mode": "fast"}, {"ms": ms, "share": share})
    report.add({"work": "a", "mode": "fast"}, {"ms": ms + 2, "share": share})
    return report.as_json()


@pytest.mark.parametrize(
    ("share", "ms", "verdicts"),
    [(0.7, 7.0, ["met", "met"]), (0.699, 7.1, ["missed", "missed"]), (0.71, 9, ["met", "missed"])],
)
def test_medians_are_compared_with_the_goals(share: float, ms: float, verdicts: list[str]) -> None:
    reports = {"before": Report("empty").as_json(), "after": report(share, ms)}
    shares, times = (line.cells(reports) for line in (SHARE, TIME))
    assert [shares[-1], times[-1]] == verdicts
    assert shares[1:4] == ["-", f"{100 * share:.1f} %", ">= 70.0 %"]
    assert times[1:4] == ["-", f"{ms + 1:.4g} ms", "<= 8 ms"]
    assert [line.cells({})[1:3] for line in LINES] == [["-", "-"]] * len(LINES)


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
