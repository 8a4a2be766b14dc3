"""The GPU benchmarks, tried on a CPU with small numbers: every row comes, and what only a GPU has is said to be missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import clock as gpu_clock
from benchmarks.gpu import engine as gpu_engine
from benchmarks.gpu import kernels as gpu_kernels
from benchmarks.gpu.clock import Clock, Rates, measure_rates
from benchmarks.gpu.kernel_bench import Bench, lens_of_workload
from benchmarks.gpu.modes import FASTEST, Mode, modes_of, running_in
from benchmarks.gpu.parts import kept_going
from benchmarks.gpu.targets import TARGETS
from benchmarks.report import Report
from benchmarks.session import runner_of
from benchmarks.workload import NANO_VLLM, random_workload
from nanoengine import LLM, SamplingParams

ROOT = Path(__file__).parent.parent.parent
CPU = ["--device", "cpu", "--dtype", "float32"]
SMALL_KERNELS = ["--shape", "tiny", "--batch", "1", "2", "--context", "16", "40", "--prompt", "8", "--rows", "1", "3"]
RAGGED = ["--ragged", "2", "--scale", "100"]
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


def test_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernels.json"
    assert gpu_kernels.main([*CPU, *SMALL_KERNELS, *RAGGED, "--repeat", "2", "--save", str(path)]) == 0
    found = [row["case"] for row in rows(path)]
    kernels = {case["kernel"].split(":")[0] for case in found}
    assert kernels >= {"decode attention", "prefill attention", "rotate_and_write", "add_rms_norm"}
    assert kernels >= {"product", "compute_slot_mapping", "choose_tokens"}
    assert sum(case["kernel"] == "decode attention" and case["backend"] == "torch" for case in found) == 4
    assert sum(case["kernel"].startswith("choose_tokens") for case in found) == 6
    assert sum(case["kernel"].startswith("torch.mm") for case in found) == 5 * 5
    assert sum(case["kernel"].startswith("quantized") for case in found) == 5 * 4 * 2
    assert any(case["kernel"] == "ragged decode attention" and case["batch"] == 2 for case in found)
    assert "left out: gate_and_multiply" in capsys.readouterr().out


def test_shares_are_of_what_the_device_can_do() -> None:
    report, work = Report("some"), torch.zeros(1 << 20)
    bench = Bench(*[None] * 2, *[None] * 4, Clock(torch.device("cpu"), 3), Rates(1e9, 2e9, 3e9))  # type: ignore[arg-type]
    bench.report = report
    bench.add({"kernel": "sum"}, work.sum, num_bytes=4 << 20, flop=1 << 20)
    figures = {name: figure["median"] for name, figure in report.rows[0].figures.items()}
    seconds = figures["us"] / 1e6
    assert figures["gb_s"] == pytest.approx((4 << 20) / seconds / 1e9, rel=0.5)
    assert figures["bandwidth_share"] == pytest.approx(figures["gb_s"] / 2, rel=0.5), "of the faster of read and copy"
    assert figures["limit_share"] == pytest.approx(figures["bandwidth_share"]), "there is more to move than to multiply"


def test_steps_of_the_workload() -> None:
    work = random_workload(*NANO_VLLM, vocab_size=1 << 16, seed=0)
    assert lens_of_workload(256) == [len(prompt) + min(work.output_lens) - 1 for prompt in work.prompts]
    for count in (131, 40, 8):
        lens = lens_of_workload(count)
        assert len(lens) == count
        assert max(lens) <= 2048
        assert sum(lens) / count > 900
    assert lens_of_workload(8, scale=10_000) == [1] * 8


def test_rates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_clock.SIZES, "cpu", (1 << 16, 32))
    monkeypatch.setitem(gpu_clock.FLUSH_BYTES, "cpu", 1 << 12)
    rates = measure_rates(Clock(torch.device("cpu"), 2), torch.float32)
    assert all(value > 0 for value in rates.figures.values())
    assert rates.ceiling.read_bytes_s == max(rates.read_bytes_s, rates.copy_bytes_s)


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


def test_quantized_weights_are_measured_beside_those_that_are_not(tiny: Path, tmp_path: Path) -> None:
    """Those that this device does not compute with are left out, and nothing fails."""
    path = tmp_path / "engine.json"
    small = ["--decode-len", "4", "--decode-steps", "1", "--parts", "quantized", "--option", "num_kv_blocks=100"]
    assert gpu_engine.main([*CPU, *SMALL_ENGINE, *small, "--model", str(tiny), "--save", str(path)]) == 0
    found = {
        (row["case"]["quantization"], row["case"]["num_seqs"]): row["figures"]["step_ms"]
        for row in rows(path)
        if row["case"]["work"] == "quantized decode"
    }
    assert found.keys() >= {(name, streams) for name in ("none", "int8", "int4") for streams in (1, 16)}


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
