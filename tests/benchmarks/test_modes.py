"""Every mode of `bench.py`, run as a user would, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bench
from benchmarks import determinism, session
from benchmarks.determinism import answers_of
from benchmarks.limit import Ceiling
from nanoengine import LLM
from nanoengine.core.messages import Launched, StepPlan
from nanoengine.core.model_runner import ModelRunner

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def small_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's limit takes a second to measure; these tests do not look at its size."""
    monkeypatch.setattr(session, "measure_ceiling", lambda *_: Ceiling(1e10, 1e11))


class Bench:
    """Runs `bench.py` with a model, once each."""

    def __init__(self, capsys: pytest.CaptureFixture[str], model: Path, folder: Path):
        self.capsys, self.model, self.save = capsys, model, folder / "saved.json"
        self.shown = ""

    def __call__(self, mode: str, *arguments: object, code: int = 0, repeat: int = 1) -> dict[str, Any]:
        """Returns what it saves."""
        words = [mode, *arguments, "--repeat", repeat]
        words += ["--save", self.save, *([] if "--random-weights" in arguments else ["--model", self.model])]
        assert bench.main([str(word) for word in words]) == code
        self.shown = self.capsys.readouterr().out
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


def test_interference(run: Bench) -> None:
    sizes = ["--streams", 3, "--stream-input", 5, "--stream-output", 300, "--num-prompts", 2, "--input-len", 60, 90]
    result = run("interference", *sizes, "--chunk", 8)
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
        assert figures["decode_limit_share"] >= 0
    assert result["prompts_per_s"] > 0


def test_no_torch_is_imported_until_it_is_needed() -> None:
    """Or `--cpu` could never be in time; the scheduler is measured without it."""
    code = "import sys, bench, benchmarks.scheduler; print({'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "set()", result.stdout + result.stderr


def test_what_is_not_installed_is_named(run: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package's requirements, and without those of one mode alone."""
    missing = "import sys; sys.modules['xxhash'] = None; import bench"
    result = subprocess.run([sys.executable, "-c", missing], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "bench.py needs xxhash: pip install '.[bench]'\n"
    monkeypatch.setattr("benchmarks.random_weights.find_spec", lambda _: None)
    assert bench.main(["workloads", "--random-weights", "tiny"]) == 2
    assert run.capsys.readouterr().err == "bench.py workloads needs transformers: pip install '.[bench]'\n"


def test_ctrl_c_shows_what_was_measured_so_far(run: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, calls = ModelRunner.launch, 0

    def interrupted_later(self: ModelRunner, plan: StepPlan) -> Launched:
        nonlocal calls
        calls += 1
        if calls == 14:  # 4 steps of warm-up, 6 in each repetition: in the middle of the second
            raise KeyboardInterrupt
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "launch", interrupted_later)
    work = ["--own", 2, 3, 6]
    result = run("workloads", *work, repeat=3, code=130)
    assert result["interrupted"].startswith("the run that was cut had made 6 output tokens")
    assert row(result, workload="2 of 3 + 6")["figures"]["output_tok_s"]["repetitions"] == 1
    calls = 13  # before the first figure
    result = run("workloads", *work, code=130)
    assert result["interrupted"]
    assert [r["engine"] for r in result["rows"]] == ["limit of this device"]


def test_workloads(run: Bench) -> None:
    run.model = "demo"  # type: ignore[assignment]
    names = ["one stream", "shared prefix", "streams", "prompt of 512"]
    result = run("workloads", *(word for name in names for word in ("--only", name)), "--own", 2, 5, 1)
    assert (result["mode"], result["interrupted"]) == ("workloads", None)
    assert {"versions", "cpu", "device", "threads", "backend", "arguments", "date"} <= result.keys()
    names.append("2 of 5 + 1")
    assert [r["case"].get("workload") for r in result["rows"][1:]] == names
    for name in names:
        found = medians(result, workload=name)
        assert all(
            found[figure] > 0 for figure in ("seconds", "output_tok_s", "limit_share", "ttft_ms", "prefill_tok_s")
        )
        assert all(0 <= found[figure] < 1 for figure in ("kv_waste", "host_time_share"))
        assert ("tpot_ms" in found) == ("decode_tok_s" in found) == (name not in ("prompt of 512", "2 of 5 + 1"))
        assert all(figure in run.shown.split() for figure in found)
    # Only the 32 own tokens of each prompt are computed: one step of prompts, and one for each token.
    assert medians(result, workload="shared prefix")["steps"] == 16


def test_the_same_work_in_other_ways(run: Bench) -> None:
    run.model = "demo"  # type: ignore[assignment]
    ways = ["--beside", 1, "--grammar", "--adapters", 1, 2, "--option", "enable_lora=True", "--device", "cpu"]
    result = run("workloads", "--own", 3, 5, 30, *ways)
    steps = {row["engine"]: row["figures"]["steps"]["median"] for row in result["rows"][1:]}
    assert steps.pop("a grammar") < 30
    token_by_token = ["nanoengine", "beside 1", "a grammar, token by token", "1 adapters", "2 adapters"]
    assert steps == dict.fromkeys(token_by_token, 30)
    assert medians(result, "beside 1")["fair_share"] > 0
    assert row(result, "1 adapters")["times_as_fast"]["seconds"]["median"] > 0


def test_speculation(run: Bench) -> None:
    run.model = "demo"  # type: ignore[assignment]
    result = run("speculation", "--tasks", "code", "--batch", 2, "--output-len", 9)
    ours, without = (medians(result, engine, batch=2) for engine in ("nanoengine", "without speculation"))
    assert ours["tokens"] == without["tokens"]
    assert ours["decode_steps"] <= without["decode_steps"]
    assert 0 <= ours["accepted_rate"] <= 1
    assert not [own for own in result["warnings"] if "differ" in own]


def test_http(run: Bench) -> None:
    run.model = "demo"  # type: ignore[assignment]
    result = run("http", "--streams", 2, "--tokens", 8)
    assert [r["case"]["work"] for r in result["rows"]] == ["offline", "whole", "streamed", "streamed by 8"]
    assert all(medians(result, work=work)["of_offline"] > 0 for work in ("whole", "streamed"))
    assert medians(result, work="streamed")["ttft_ms"] > 0
