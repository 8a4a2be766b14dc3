"""Every mode of `bench.py`, run as a user would, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from time import sleep
from typing import Any

import pytest

import bench
from benchmarks import determinism
from benchmarks.determinism import answers_of
from benchmarks.neighbours import Neighbours, fair_share
from nanoengine import LLM
from nanoengine.core.messages import StepPlan
from nanoengine.core.model_runner import LaunchedStep, ModelRunner

ROOT = Path(__file__).parent.parent.parent
TINY_WORK = ["--num-seqs", "4", "--input-len", "3", "9", "--output-len", "2", "6"]


@pytest.fixture(autouse=True)
def small_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's limit takes a second to measure; these tests do not look at its size."""
    from benchmarks import session
    from benchmarks.limit import Ceiling

    monkeypatch.setattr(session, "measure_ceiling", lambda *_: Ceiling(1e10, 1e11))


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict[str, Any]:
    """Run `bench.py`; returns its last line."""
    assert bench.main([str(argument) for argument in arguments]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def row(result: dict[str, Any], engine: str = "nanoengine", **case: Any) -> dict[str, Any]:
    rows = [r for r in result["rows"] if r["engine"] == engine and case.items() <= r["case"].items()]
    assert len(rows) == 1, result["rows"]
    return rows[0]


def test_throughput(capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path) -> None:
    save, plot = tmp_path / "run.json", tmp_path / "run.png"
    options = ["--model", tiny, "--repeat", 2, "--vs", "transformers", "--save", save, "--plot", plot]
    result = run(capsys, "throughput", *TINY_WORK, *options)
    assert result["mode"] == "throughput"
    assert result["interrupted"] is None
    assert {"versions", "cpu", "device", "threads", "backend", "arguments", "date"} <= result.keys()
    ours = row(result, num_seqs=4)["figures"]
    for name in ("output_tok_s", "output_tok_s_share", "ttft_ms", "tpot_ms", "itl_ms", "prefill_tok_s", "decode_tok_s"):
        assert 0 < ours[name]["min"] <= ours[name]["median"] <= ours[name]["max"]
        assert ours[name]["repetitions"] == 2
    assert 0 < ours["kv_waste"]["median"] < 1
    assert 0 < ours["host_time_share"]["median"] < 1
    for peer in ("transformers", "transformers continuous batching"):
        theirs = row(result, peer)
        assert theirs["figures"]["output_tok_s"]["repetitions"] == 2
        assert theirs["times_as_fast"]["output_tok_s"]["median"] > 0
    assert json.loads(save.read_text()) == result
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert any("plain torch" in warning for warning in result["warnings"]), "a slow path is named"


def test_the_tables_show_what_the_json_holds(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    assert bench.main(["throughput", *TINY_WORK, "--model", str(tiny), "--repeat", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    shown = " ".join(lines[:-1]).split()
    for name, figure in row(result, num_seqs=4)["figures"].items():
        assert name in shown
        median = figure["median"]
        assert (f"{median:.0f}" if median >= 1000 else f"{median:.3g}") in shown


@pytest.mark.parametrize("mode", ["throughput", "serve"])
def test_outputs_of_one_token_have_no_decode_steps(
    capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path, mode: str
) -> None:
    options = ["--model", tiny, "--repeat", 1, "--plot", tmp_path / "one.png"]
    rate = ["--rate", 100] if mode == "serve" else []
    result = run(capsys, mode, "--num-seqs", 2, "--input-len", 4, 9, "--output-len", 1, 1, *rate, *options)
    figures = next(r["figures"] for r in result["rows"] if r["engine"] == "nanoengine")
    assert figures["prefill_tok_s"]["median"] > 0
    assert not {"decode_tok_s", "tpot_ms", "itl_ms"} & figures.keys()


def test_latency(capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path) -> None:
    options = ["--model", tiny, "--repeat", 1, "--vs", "transformers", "--plot", tmp_path / "latency.png"]
    result = run(capsys, "latency", "--input-len", 4, 20, "--output-len", 1, 5, *options)
    for input_len in (4, 20):
        several = row(result, input_len=input_len, output_len=5)["figures"]
        assert {"ttft_ms", "tpot_ms", "itl_ms", "itl_ms_p99", "ttft_ms_share", "tpot_ms_share"} == several.keys()
        single = row(result, input_len=input_len, output_len=1)["figures"]
        assert {"ttft_ms", "ttft_ms_share"} == single.keys(), "a single token has no time per token after it"
        theirs = row(result, "transformers", input_len=input_len, output_len=5)
        assert {"ttft_ms", "tpot_ms", "itl_ms", "itl_ms_p99"} == theirs["times_as_fast"].keys()
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


def test_latency_beside_busy_processes(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    result = run(capsys, "latency", "--beside", 2, "--input-len", 4, "--output-len", 5, "--model", tiny, "--repeat", 1)
    alone, beside = (row(result, beside=count)["figures"] for count in (0, 2))
    assert "fair_share" not in alone
    assert beside.keys() >= {"ttft_ms", "tpot_ms", "fair_share"}
    assert beside["fair_share"]["median"] > 0


def test_neighbours_are_busy_only_while_they_are_let_loose() -> None:
    def seconds() -> float:
        stats = (Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1] for process in neighbours._processes)
        return sum(sum(map(int, stat.split()[11:13])) for stat in stats) / os.sysconf("SC_CLK_TCK")

    with Neighbours(2) as neighbours:
        before = seconds()
        sleep(0.05)
        assert seconds() == before
        with neighbours.let_loose():
            while seconds() < before + 0.1:
                sleep(0.01)
    assert all(process.returncode is not None for process in neighbours._processes)


@pytest.mark.parametrize(
    ("cpus", "threads", "neighbours", "share"),
    [(2, 2, 2, 0.5), (2, 2, 0, 1), (4, 2, 2, 1), (2, 4, 4, 0.5), (8, 4, 8, 2 / 3)],
)
def test_a_share_is_fair_if_all_who_want_a_cpu_get_the_same(
    monkeypatch: pytest.MonkeyPatch, cpus: int, threads: int, neighbours: int, share: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    assert fair_share(threads, neighbours) == pytest.approx(share)


def test_determinism(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    work = ["--num-seqs", 8, "--ways", 3, "--input-len", 40, "--output-len", 4]
    result = run(capsys, "determinism", *work, "--vs", "transformers")
    for way in (1, 2):
        figures = row(result, way=way)["figures"]
        assert figures["different_tokens"]["median"] == figures["different_logprobs"]["median"] == 0
    assert {"different_tokens", "different_logprobs"} <= row(result, "transformers", batch=8)["figures"].keys()

    def wrong(llm: LLM, prompts: list[list[int]], output_len: int, order: list[int], label: str | None = None) -> Any:
        found = answers_of(llm, prompts, output_len, order, label)
        if label == "way 2":
            found[3] = found[3][0], [*found[3][1][:-1], 0.5]
        return found

    monkeypatch.setattr(determinism, "answers_of", wrong)
    result = run(capsys, "determinism", *work, code=1)
    assert [row(result, way=way)["figures"]["different_logprobs"]["median"] for way in (1, 2)] == [0, 1]


@pytest.mark.parametrize("arrivals", ["poisson", "constant"])
def test_serve(capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path, arrivals: str) -> None:
    options = ["--model", tiny, "--repeat", 1, "--plot", tmp_path / "serve.png", "--arrivals", arrivals]
    slo = ["--slo", "ttft=1e6,tpot=1e6"]
    result = run(capsys, "serve", *TINY_WORK, "--rate", 50, 1000, *slo, *options)
    for rate in (50, 1000):
        figures = row(result, rate=rate)["figures"]
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
            assert {name, f"{name}_mean", f"{name}_p90", f"{name}_p99"} <= figures.keys()
            assert figures[name]["median"] <= figures[f"{name}_p90"]["median"] <= figures[f"{name}_p99"]["median"]
        assert figures["goodput_share"]["median"] == 1.0, "nobody is slower than a thousand seconds"
        assert figures["goodput_req_s"] == figures["finished_req_s"]
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")


def test_serve_finds_its_own_rates(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    result = run(capsys, "serve", *TINY_WORK, "--model", tiny, "--repeat", 1, "--slo", "ttft=1e-6")
    rates = [r["case"]["rate"] for r in result["rows"] if "rate" in r["case"]]
    assert rates == pytest.approx([share * result["capacity_req_s"] for share in (0.25, 0.5, 0.75, 1, 1.25)], abs=1e-3)
    assert all(r["figures"]["goodput_share"]["median"] == 0 for r in result["rows"] if "rate" in r["case"])


def test_serve_compares_policies_on_the_same_arrivals(
    capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path
) -> None:
    policies = ["--policy", "prefill_first", "mixed", "--chunk", 4]
    options = ["--model", tiny, "--repeat", 1, "--plot", tmp_path / "serve.png"]
    result = run(capsys, "serve", *TINY_WORK, "--rate", 1000, *policies, *options)
    figures = {
        policy: row(result, rate=1000, policy=policy, chunk=4)["figures"] for policy in ("prefill_first", "mixed")
    }
    assert all({"output_tok_s", "ttft_ms", "itl_ms_p99"} <= found.keys() for found in figures.values())
    assert "mixed_tok_s" not in figures["prefill_first"]
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")


def test_interference(capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path) -> None:
    sizes = ["--streams", 3, "--stream-input", 5, "--stream-output", 300, "--num-prompts", 2, "--input-len", 60, 90]
    options = ["--model", tiny, "--repeat", 1, "--chunk", 8, 32, "--plot", tmp_path / "interference.png"]
    result = run(capsys, "interference", *sizes, *options)
    for policy, chunk in product(("prefill_first", "mixed"), (8, 32)):
        figures = row(result, policy=policy, chunk=chunk)["figures"]
        if "itl_ms" not in figures:  # on a machine that did something else for a while, streams end before prompts come
            assert any("streams ended" in warning for warning in result["warnings"])
            continue
        for name in ("itl_ms", "slowdown", "ttft_ms"):
            assert 0 < figures[name]["median"] <= figures[f"{name}_p99"]["median"] <= figures[f"{name}_max"]["median"]
        assert figures["alone_ms"]["median"] > 0
        for name in (
            "output_tok_s",
            "prompt_tok_s",
            "decode_limit_share",
        ):  # a prompt may be done before a stream goes on
            assert figures[name]["median"] >= 0
        assert policy == "mixed" or "mixed_tok_s" not in figures, "prompts are computed alone"
        assert "prefill_tok_s" in figures, "that of the streams themselves"
    assert result["prompts_per_s"] > 0
    assert (tmp_path / "interference.png").read_bytes().startswith(b"\x89PNG")


def test_interference_at_a_given_rate_says_when_the_streams_were_too_short(
    capsys: pytest.CaptureFixture[str], tiny: Path
) -> None:
    sizes = ["--streams", 2, "--stream-input", 5, "--stream-output", 40, "--num-prompts", 2, "--input-len", 20, 20]
    options = ["--model", tiny, "--repeat", 1, "--policy", "mixed", "--rate", 0.5]
    result = run(capsys, "interference", *sizes, *options)
    assert result["prompts_per_s"] == 0.5
    assert any("streams ended before the last prompt" in warning for warning in result["warnings"])


def test_interference_needs_room_for_a_prompt(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    options = ["--model", str(tiny), "--stream-output", "40", "--input-len", "20", "20", "--option", "max_num_seqs=8"]
    assert bench.main(["interference", *options]) == 2
    assert "BadOption: --streams is 8, but only 8 sequences can run at once" in capsys.readouterr().err


def test_prefix(capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path) -> None:
    sizes = ["--num-seqs", 3, "--prefix-len", 64, "--user-len", 8, "--output-len", 4, "--chats", 2, "--turns", 3]
    options = ["--model", tiny, "--repeat", 1, "--plot", tmp_path / "prefix.png"]
    result = run(capsys, "prefix", *sizes, *options)
    system = row(result, workload="system prompt")["figures"]
    assert system["hit_rate"]["median"] == pytest.approx(64 / 72), "4 blocks of 16 of each prompt"
    assert system["computed_tokens"]["median"] == 3 * (8 + 3), (
        "each question, and all but the last token of each answer"
    )
    chats = row(result, workload="chats")["figures"]
    # Prompts of 8, 20 and 32 tokens: the second hits no full block (11 tokens were computed), the third one (23 were).
    assert chats["hit_rate"]["median"] == pytest.approx(16 / 60, abs=1e-5)
    for workload in ("system prompt", "chats"):
        without = row(result, "without prefix cache", workload=workload)
        assert without["figures"]["hit_rate"]["median"] == 0
        assert without["times_as_fast"]["computed_tokens"]["median"] > 1
    assert (tmp_path / "prefix.png").read_bytes().startswith(b"\x89PNG")


def test_startup(capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path) -> None:
    options = ["--model", tiny, "--repeat", 1, "--input-len", 5, "--plot", tmp_path / "startup.png"]
    result = run(capsys, "startup", *options, "--vs", "transformers")
    for engine in ("nanoengine", "transformers"):
        figures = row(result, engine, input_len=5)["figures"]
        times = [figures[name]["median"] for name in ("import_s", "ready_s", "first_token_s")]
        assert 0 < times[0] < times[1] < times[2]
        assert figures["peak_memory_mb"]["median"] > 50
        floor = row(result, "floor")["figures"]["weights_read_s"]["median"]
        assert figures["times_floor"]["median"] == pytest.approx(times[2] / floor, rel=1e-3)
    assert result["checkpoint_mb"] == pytest.approx((tiny / "model.safetensors").stat().st_size / 1e6)


def test_startup_says_why_a_process_failed(capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).write_bytes(file.read_bytes() if file.suffix == ".json" else b"nothing")
    assert bench.main(["startup", "--model", str(broken), "--repeat", "1", "--input-len", "5"]) == 2
    assert "ChildFailed: nanoengine has not come to a first token" in capsys.readouterr().err


def test_random_weights_are_made_used_and_deleted(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--random-weights", "tiny", "--repeat", 1, "--option", "num_kv_blocks=64"]
    result = run(capsys, "throughput", *TINY_WORK, *options, "--option", "max_model_len=128")
    assert result["kv_blocks"] == 64
    assert result["arguments"]["random_weights"] == "tiny"


def test_the_scheduler_mode_needs_no_torch() -> None:
    code = "import sys, bench, benchmarks.scheduler; print({'torch', 'transformers', 'matplotlib'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "set()", result.stdout + result.stderr


def test_ctrl_c_shows_what_was_measured_so_far(
    capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, calls = ModelRunner.launch, 0

    def interrupted_later(self: ModelRunner, plan: StepPlan) -> LaunchedStep:
        nonlocal calls
        calls += 1
        if calls == 14:  # 4 steps of warm-up, 6 in each repetition: in the middle of the second
            raise KeyboardInterrupt
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "launch", interrupted_later)
    work = ["--num-seqs", "2", "--input-len", "3", "3", "--output-len", "6", "6"]
    result = run(capsys, "throughput", *work, "--model", tiny, "--save", tmp_path / "part.json", code=130)
    assert result["interrupted"].startswith("the run that was cut had made 6 output tokens")
    assert row(result, num_seqs=2)["figures"]["output_tok_s"]["repetitions"] == 1
    assert json.loads((tmp_path / "part.json").read_text()) == result


def test_ctrl_c_before_the_first_figure(
    capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelRunner, "launch", interrupted)
    save = tmp_path / "nothing.json"
    result = run(capsys, "latency", "--input-len", 4, "--output-len", 4, "--model", tiny, "--save", save, code=130)
    assert result["interrupted"]
    assert [r["engine"] for r in result["rows"]] == ["limit of this device"]


def test_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["one stream", "shared prefix", "streams"]
    only = [word for name in names for word in ("--only", name)]
    result = run(capsys, "workloads", "--model", "demo", "--repeat", 1, *only)
    assert [r["case"].get("workload") for r in result["rows"][1:]] == names
    for name, figure in zip(names, ("tpot_ms", "seconds", "decode_tok_s"), strict=True):
        figures = row(result, workload=name)["figures"]
        assert figures[figure]["median"] > 0
        assert figures["limit_share"]["median"] > 0
    # Only the 32 own tokens of each prompt are computed, so a step of them is a small one.
    assert row(result, workload="shared prefix")["figures"]["prefill_tok_s"]["median"] > 0


def test_profile(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    options = ["--num-seqs", 2, "--input-len", 9, "--top", 4, "--repeat", 1]
    result = run(capsys, "profile", "--model", tiny, *options)
    for step in ("prefill of 2 x 9", "decode step of 2"):
        rows = [r for r in result["rows"] if r["case"]["step"] == step]
        assert len(rows) == 1 + 4
        assert rows[0]["case"]["operation"] == "(all)"
        shares = [r["figures"]["share"]["median"] for r in rows[1:]]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) <= 1.0 + 1e-6
    assert any("linear" in r["case"]["operation"] for r in result["rows"])
