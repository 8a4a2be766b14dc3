"""How much the host does in a steady decode step: it grows only if somebody says so here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_steady_step_of_one_sequence_stays_as_short_as_it_is(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))}
    saved = tmp_path / "steps.json"
    command = [sys.executable, "-m", "benchmarks.host_step", "--num-seqs", "1", "--save", str(saved)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [row] = json.loads(saved.read_text())["rows"]
    found = {name: figures["median"] for name, figures in row["figures"].items()}
    assert found["kernels"] == 2
    assert found["bytecodes"] < 3300
    assert found["calls"] < 230
