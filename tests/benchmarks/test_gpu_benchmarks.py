"""The GPU benchmarks, tried on a CPU with small numbers: every row comes, and what only a GPU has is said to be missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import engine as gpu_engine
from benchmarks.gpu import kernels as gpu_kernels
from benchmarks.gpu.clock import Rates
from benchmarks.gpu.modes import FASTEST, Mode, modes_of, running_in
from benchmarks.gpu.parts import kept_going
from benchmarks.gpu.targets import TARGETS
from benchmarks.report import Report
from benchmarks.session import runner_of
from nanoengine import LLM, SamplingParams

ROOT = Path(__file__).parent.parent.parent
CPU = ["--device", "cpu", "--dtype", "float32"]
SMALL_ENGINE = [
    *["--num-seqs", "4", "--input-len", "3", "9", "--output-len", "2", "6", "--stream-len", "16", "5"],
    *["--decode-len", "8", "--decode-steps", "3", "--repeat", "1", "--workload-repeat", "1"],
]


@pytest.fixture(autouse=True)
def small_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's rates take a while to measure; these tests do not look at their size."""
    rates = Rates(1e9, 2e9, 3e9)
    for module in (gpu_kernels, gpu_engine):
        monkeypatch.setattr(module, "measure_rates", lambda *_: rates)


def rows(path: Path) -> list[dict[str, Any]]:
    report = json.loads(path.read_text())
    assert "failed" not in report, report["warnings"]
    for row in report["rows"]:
        assert all(figure["median"] >= 0 for figure in row["figures"].values())
    found: list[dict[str, Any]] = report["rows"]
    return found


def test_engine(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "engine.json"
    parts = ["--parts", *(part for part in gpu_engine.PARTS if part != "quantized")]
    options = ["--model", str(tiny), "--option", "num_kv_blocks=100", "--save", str(path)]
    arguments = [*CPU, *SMALL_ENGINE, *parts, *options]
    assert gpu_engine.main(arguments) == 0
    found = {(r["case"]["work"], r["case"].get("mode", r["case"].get("variant"))): r["figures"] for r in rows(path)}
    assert found["equal tokens", None]["differing"]["median"] == 0
    assert found["equal tokens", None]["preemptions"]["median"] > 0
    for mode in ("overlap, eager", "one at a time, eager"):
        assert {"ttft_ms", "tpot_ms", "ttft_ms_share"} <= found["one stream", mode].keys()
        assert {"output_tok_s", "output_tok_s_share", "decode_limit_share"} <= found["workload", mode].keys()
        assert {"step_ms", "limit_share", "launch_us"} <= found["decode", mode].keys()
    assert found["overlap", None]["times_as_fast"]["median"] > 0
    starts = [figures for (work, _), figures in found.items() if work == "start-up"]
    assert len(starts) == 1
    shown = capsys.readouterr().out
    for missing in ("CUDA graphs", "how busy the device is"):
        assert f"left out: {missing}" in shown


def test_the_targets_ask_for_rows_that_the_benchmarks_make() -> None:
    """Their words are the same in both places; a misspelled one would be "not run" for ever."""
    names = ["gpu/kernel_bench", "gpu/attention_kernels", "gpu/engine", "gpu/decode", "latency", "figures"]
    sources = "".join((ROOT / "benchmarks" / f"{name}.py").read_text() for name in names)
    for target in TARGETS:
        values = [target.case[key] for key in ("work", "kernel") if key in target.case]
        for word in (target.figure, *target.case, *values):
            assert f'"{word}"' in sources, word
        assert target.case.get("mode", str(FASTEST)) == str(FASTEST)


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
