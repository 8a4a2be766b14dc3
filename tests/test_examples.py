"""Every example, and a small benchmark, run to their end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bench

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_example_runs(example: str) -> None:
    assert run(f"examples/{example}").strip()


def test_bench_prints_its_figures_and_one_json_line() -> None:
    tiny = [
        "--num-seqs",
        "2",
        "--input-len",
        "4",
        "9",
        "--output-len",
        "3",
        "5",
        "--repeat",
        "2",
        "--vs",
        "transformers",
    ]
    shown = run("bench.py", *tiny)
    for word in ("TTFT", "TPOT", "tok/s", "limit", "transformers"):
        assert word in shown
    figures = json.loads(shown.splitlines()[-1])
    assert figures["output_tok_s"]["median"] > 0
    assert figures["transformers tpot_ms"]["median"] > 0
    assert 0 < figures["decode_share_of_limit"]["median"] < 1


@pytest.mark.parametrize("output_len", [("1", "1"), ("1", "2")], ids=" to ".join)
def test_bench_runs_where_there_is_nothing_to_decode(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output_len: tuple[str, str]
) -> None:
    """Outputs of one token need no decode step; of one or two, some repetitions have decode steps and others not."""
    work = ["--model", str(tiny), "--num-seqs", "1", "--input-len", "4", "9", "--repeat", "6"]
    monkeypatch.setattr(sys, "argv", ["bench.py", *work, "--output-len", *output_len])
    monkeypatch.setattr(bench, "read_bandwidth", lambda _device: 1e9)
    monkeypatch.setattr(bench, "STREAM_TOKENS", 4)
    bench.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["output_tok_s"]["median"] > 0
    assert ("decode_tok_s" in figures) == (output_len != ("1", "1"))
