"""Every mode of `bench.py`, run as a user would, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bench
from benchmarks import determinism, first_token, session, startup
from benchmarks.determinism import answers_of
from benchmarks.limit import Ceiling
from nanoengine import LLM
from nanoengine.core.messages import Launched, StepPlan
from nanoengine.core.model_runner import ModelRunner

ROOT = Path(__file__).parent.parent.parent
TINY_WORK = ["--num-seqs", "4", "--input-len", "3", "9", "--output-len", "2", "6"]
PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def small_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's limit takes a second to measure; these tests do not look at its size."""
    monkeypatch.setattr(session, "measure_ceiling", lambda *_: Ceiling(1e10, 1e11))


class Bench:
    """Runs `bench.py` with a model, once each; every run is plotted."""

    def __init__(self, capsys: pytest.CaptureFixture[str], model: Path, folder: Path):
        self.capsys, self.model, self.plot, self.save = capsys, model, folder / "plot.png", folder / "saved.json"
        self.shown = ""

    def __call__(
        self, mode: str, *arguments: object, code: int = 0, repeat: int = 1, plot: bool = False
    ) -> dict[str, Any]:
        """Returns what it saves."""
        words = [mode, *arguments, "--repeat", repeat, *(["--plot", self.plot] if plot else [])]
        words += ["--save", self.save, *([] if "--random-weights" in arguments else ["--model", self.model])]
        assert bench.main([str(word) for word in words]) == code
        self.shown = self.capsys.readouterr().out
        assert not plot or self.plot.read_bytes().startswith(PNG)
        result: dict[str, Any] = json.loads(self.save.read_text())
        return result


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path) -> Bench:
    return Bench(capsys, tiny, tmp_path)


def row(result: dict[str, Any], engine: str = "nanoengine", **case: Any) -> dict[str, Any]:
    rows = [r for r in result["rows"] if r["engine"] == engine and case.items() <= r["case"].items()]
    assert len(rows) == 1, result["rows"]
    return rows[0]


def medians(result: dict[str, Any], engine: str = "nanoengine", **case: Any) -> dict[str, float]:
    return {name: figure["median"] for name, figure in row(result, engine, **case)["figures"].items()}


def test_throughput(run: Bench) -> None:
    result = run("throughput", *TINY_WORK, "--vs", "transformers", repeat=2, plot=True)
    assert (result["mode"], result["interrupted"]) == ("throughput", None)
    assert {"versions", "cpu", "device", "threads", "backend", "arguments", "date"} <= result.keys()
    ours = row(result, num_seqs=4)["figures"]
    for name in ("output_tok_s", "output_tok_s_share", "ttft_ms", "tpot_ms", "itl_ms", "prefill_tok_s", "decode_tok_s"):
        assert 0 < ours[name]["min"] <= ours[name]["median"] <= ours[name]["max"]
        assert ours[name]["repetitions"] == 2
    for name in ("kv_waste", "host_time_share"):
        assert 0 < ours[name]["median"] < 1
    for peer in ("transformers", "transformers continuous batching"):
        theirs = row(result, peer)
        assert theirs["figures"]["output_tok_s"]["repetitions"] == 2
        assert theirs["times_as_fast"]["output_tok_s"]["median"] > 0
    assert any("plain torch" in warning for warning in result["warnings"]), "a slow path is named"
    for name, figure in ours.items():
        assert name in run.shown.split()
        median = figure["median"]
        assert (f"{median:.0f}" if median >= 1000 else f"{median:.3g}") in run.shown


def test_latency(run: Bench) -> None:
    result = run("latency", "--input-len", 4, 20, "--output-len", 1, 5, "--vs", "transformers", plot=True)
    latencies = {"ttft_ms", "tpot_ms", "itl_ms", "itl_ms_p99"}
    for input_len in (4, 20):
        several = row(result, input_len=input_len, output_len=5)["figures"]
        assert several.keys() == latencies | {"ttft_ms_share", "tpot_ms_share"}
        single = row(result, input_len=input_len, output_len=1)["figures"]
        assert single.keys() == {"ttft_ms", "ttft_ms_share"}, "a single token has no time per token after it"
        assert row(result, "transformers", input_len=input_len, output_len=5)["times_as_fast"].keys() == latencies


def test_determinism(run: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(llm: LLM, prompts: list[list[int]], output_len: int, order: list[int], label: str | None = None) -> Any:
        found = answers_of(llm, prompts, output_len, order, label)
        if label == "way 2":
            found[3] = found[3][0], [*found[3][1][:-1], 0.5]
        return found

    run.model = "demo"  # type: ignore[assignment]
    work = ["--num-seqs", 8, "--ways", 3, "--input-len", 40, "--output-len", 4]
    for code in (0, 1):
        result = run("determinism", *work, "--vs", "transformers", code=code)
        assert [medians(result, way=way)["different_tokens"] for way in (1, 2)] == [0, 0]
        assert [medians(result, way=way)["different_logprobs"] for way in (1, 2)] == [0, code]
        assert {"different_tokens", "different_logprobs"} <= medians(result, "transformers", batch=8).keys()
        monkeypatch.setattr(determinism, "answers_of", wrong)


def test_serve(run: Bench) -> None:
    options = ["--arrivals", "constant", "--slo", "ttft=1e6,tpot=1e6"]
    result = run("serve", *TINY_WORK, "--rate", 50, 1000, *options, plot=True)
    for rate in (50, 1000):
        figures = medians(result, rate=rate)
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
            assert {name, f"{name}_mean", f"{name}_p90", f"{name}_p99"} <= figures.keys()
            assert figures[name] <= figures[f"{name}_p90"] <= figures[f"{name}_p99"]
        assert figures["goodput_share"] == 1.0, "nobody is slower than a thousand seconds"
        assert figures["goodput_req_s"] == figures["finished_req_s"]


def test_interference(run: Bench) -> None:
    sizes = ["--streams", 3, "--stream-input", 5, "--stream-output", 300, "--num-prompts", 2, "--input-len", 60, 90]
    result = run("interference", *sizes, "--chunk", 8, plot=True)
    for policy in ("prefill_first", "mixed"):
        figures = medians(result, policy=policy, chunk=8)
        assert policy == "mixed" or "mixed_tok_s" not in figures, "prompts are computed alone"
        assert "prefill_tok_s" in figures, "that of the streams themselves"
        if "itl_ms" not in figures:  # on a machine that did something else for a while, streams end before prompts come
            assert any("streams ended" in warning for warning in result["warnings"])
            continue
        for name in ("itl_ms", "slowdown", "ttft_ms"):
            assert 0 < figures[name] <= figures[f"{name}_p99"] <= figures[f"{name}_max"]
        assert figures["alone_ms"] > 0
        # A prompt may be done before a stream goes on.
        assert all(figures[name] >= 0 for name in ("output_tok_s", "prompt_tok_s", "decode_limit_share"))
    assert result["prompts_per_s"] > 0


def test_prefix(run: Bench) -> None:
    sizes = ["--num-seqs", 3, "--prefix-len", 64, "--user-len", 8, "--output-len", 4, "--chats", 2, "--turns", 3]
    result = run("prefix", *sizes, plot=True)
    system, chats = (medians(result, workload=name) for name in ("system prompt", "chats"))
    assert system["hit_rate"] == pytest.approx(64 / 72), "4 blocks of 16 of each prompt"
    assert system["computed_tokens"] == 3 * (8 + 3), "each question, and all but the last token of each answer"
    # Prompts of 8, 20 and 32 tokens: the second hits no full block (11 tokens were computed), the third one (23 were).
    assert chats["hit_rate"] == pytest.approx(16 / 60, abs=1e-5)
    for workload in ("system prompt", "chats"):
        assert medians(result, "without prefix cache", workload=workload)["hit_rate"] == 0
        without = row(result, "without prefix cache", workload=workload)
        assert without["times_as_fast"]["computed_tokens"]["median"] > 1


def test_startup(run: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that it starts are played by this one, which has imported everything."""

    def played(command: list[str], **_: object) -> Any:
        assert command[:3] == [sys.executable, "-m", "benchmarks.first_token"]
        with redirect_stdout(StringIO()) as written:
            first_token.main(*command[3:])
        return SimpleNamespace(returncode=0, stdout=written.getvalue())

    monkeypatch.setattr(startup.subprocess, "run", played)
    result = run("startup", "--input-len", 5, plot=True)
    figures = medians(result, input_len=5)
    assert 0 < figures["import_s"] < figures["ready_s"] < figures["first_token_s"]
    assert figures["peak_memory_mb"] > 50
    floor = medians(result, "floor")["weights_read_s"]
    assert figures["times_floor"] == pytest.approx(figures["first_token_s"] / floor, rel=1e-3)
    assert result["checkpoint_mb"] == pytest.approx((run.model / "model.safetensors").stat().st_size / 1e6)


def test_no_torch_is_imported_until_it_is_needed() -> None:
    """Or `--cpu` could never be in time; the scheduler is measured without it."""
    code = "import sys, bench, benchmarks.scheduler; print({'torch', 'transformers', 'matplotlib'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "set()", result.stdout + result.stderr


def test_ctrl_c_shows_what_was_measured_so_far(run: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, calls = ModelRunner.launch, 0

    def interrupted_later(self: ModelRunner, plan: StepPlan) -> Launched:
        nonlocal calls
        calls += 1
        if calls == 14:  # 4 steps of warm-up, 6 in each repetition: in the middle of the second
            raise KeyboardInterrupt
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "launch", interrupted_later)
    work = ["--num-seqs", "2", "--input-len", "3", "3", "--output-len", "6", "6"]
    result = run("throughput", *work, repeat=3, code=130)
    assert result["interrupted"].startswith("the run that was cut had made 6 output tokens")
    assert row(result, num_seqs=2)["figures"]["output_tok_s"]["repetitions"] == 1
    calls = 13  # before the first figure
    result = run("latency", "--input-len", 4, "--output-len", 4, code=130)
    assert result["interrupted"]
    assert [r["engine"] for r in result["rows"]] == ["limit of this device"]


def test_structured(run: Bench) -> None:
    run.model = "demo"  # type: ignore[assignment]
    result = run("structured", "--streams", "1", "3", "--input-len", "5", "--output-len", "30", "--device", "cpu")
    for streams in (1, 3):
        held = medians(result, streams=streams)
        steps = [
            medians(result, way, streams=streams)["steps"] for way in ("without forced tokens", "without a grammar")
        ]
        assert held["steps"] < steps[0] == steps[1] == 30
        assert 0 < held["forced_share"] < 1
        assert 0 < held["mask_us"] <= held["mask_us_p99"]
        assert 0 < held["wait_us"] <= held["wait_us_p99"]
        assert held["ttft_ms"] > 0
    assert medians(result, "a new schema")["compile_ms"] > 0
    assert not [own for own in result["warnings"] if "differ" in own or "ended" in own]
    assert bench.main(["structured", "--model", "demo", "--output-len", "5000"]) == 2


def test_workloads(run: Bench) -> None:
    run.model = "demo"  # type: ignore[assignment]
    figures = {"one stream": "tpot_ms", "shared prefix": "seconds", "streams": "decode_tok_s"}
    result = run("workloads", *(word for name in figures for word in ("--only", name)))
    assert [r["case"].get("workload") for r in result["rows"][1:]] == list(figures)
    for name, figure in figures.items():
        found = medians(result, workload=name)
        assert found[figure] > 0
        assert found["limit_share"] > 0
    # Only the 32 own tokens of each prompt are computed, so a step of them is a small one.
    assert medians(result, workload="shared prefix")["prefill_tok_s"] > 0


def test_profile(run: Bench) -> None:
    result = run("profile", "--num-seqs", 2, "--input-len", 9, "--top", 4)
    for step in ("prefill of 2 x 9", "decode step of 2"):
        whole, *rows = [r for r in result["rows"] if r["case"]["step"] == step]
        assert len(rows) == 4
        assert whole["case"]["operation"] == "(all)"
        shares = [r["figures"]["share"]["median"] for r in rows]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) <= 1.0 + 1e-6
    assert any("linear" in r["case"]["operation"] for r in result["rows"])


@pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="gathers are measured in a file without a name, as Linux has it"
)
def test_ranks(run: Bench) -> None:
    result = run("ranks", "--input-len", 9, "--output-len", 4)
    for engine in ("nanoengine", "a worker", "2 ranks"):
        assert medians(result, engine, input_len=9)["tpot_ms"] > 0
    gathers = medians(result, "2 ranks", rows=1)
    assert gathers["logits_us"] > 0
    assert gathers["gathers_share"] > 0
    assert medians(result, "2 ranks", rows=9)["gated_us"] > 0
