"""Actors run nothing that lies in the folder of the process that wants them; skipped where Ray is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .cluster import PATIENCE, ROOT, needs_ray

needs_ray()

SCRIPT = """
from nanoengine import LLM
LLM("demo", ray=True, replicas=1, ray_cpus=1, num_kv_blocks=200, device="cpu", use_tqdm=False).close()
"""


def test_an_actor_runs_nothing_that_lies_in_the_working_folder(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for name in ("queue", "logging", "json", "torch", "nanoengine"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\nraise SystemExit(7)\n")
    paths = os.pathsep.join([str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    command, environment = [sys.executable, "-P", "-c", SCRIPT], {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert not mark.exists()
