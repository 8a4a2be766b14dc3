"""Every example, and a small benchmark, run to their end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_bench_runs_from_the_command_line() -> None:
    shown = run("bench.py", "scheduler", "--num-seqs", "4", "--input-len", "4", "9", "--output-len", "3", "5")
    assert json.loads(shown.splitlines()[-1])["mode"] == "scheduler"
