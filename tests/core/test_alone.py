"""The core runs with the rest of the package deleted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN_TESTS = ("test_llm.py",)


def test_the_core_runs_with_the_rest_of_the_package_deleted(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "nanoengine" / "core", tmp_path / "nanoengine" / "core", ignore=shutil.ignore_patterns("__pycache__")
    )
    model, tests = tmp_path / "nanoengine" / "demo", tmp_path / "tests" / "core"
    shutil.copytree(ROOT / "nanoengine" / "demo", model, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    tests.mkdir(parents=True)
    for folder in (tmp_path / "nanoengine", tests, tests.parent):
        (folder / "__init__.py").touch()
    for name in OWN_TESTS:
        shutil.copy(ROOT / "tests" / "core" / name, tests)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(tests)]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-1000:]
    where = [sys.executable, "-c", "import nanoengine.core as core; print(core.__file__)"]
    used = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert used.startswith(str(tmp_path)), "it is the copy that was tested"
