"""The rules of the house that a machine can see: clean linters, and tensors stay below the policy."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command", [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)], ids=" ".join
)
def test_linters_are_clean(command: tuple[str, ...]) -> None:
    if importlib.util.find_spec(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed; `pip install -e .[test]` brings it")
    result = run("-m", *command)
    assert result.returncode == 0, result.stdout + result.stderr


def test_importing_the_package_or_its_engine_imports_neither_torch_nor_transformers() -> None:
    paths = [path.relative_to(ROOT) for path in (ROOT / "nanoengine" / "engine").rglob("*.py")]
    imports = "; ".join(f"import {'.'.join(path.with_suffix('').parts)}" for path in paths if path.stem != "__init__")
    result = run("-c", f"import sys, nanoengine; {imports}; print({{'torch', 'transformers'}} & set(sys.modules))")
    assert result.stdout.strip() == "set()", result.stdout + result.stderr


def test_every_module_of_the_engine_has_its_tests() -> None:
    for folder in ("engine", "engine/kv", "runner", "models", "layers", "kernels", "attention"):
        modules = {path.stem for path in (ROOT / "nanoengine" / folder).glob("*.py")} - {"__init__"}
        tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / folder).glob("test_*.py")}
        assert modules <= tests, f"{folder}: no tests for {sorted(modules - tests)}"
