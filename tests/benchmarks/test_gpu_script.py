"""gpu.sh as a whole, in miniature: what its calls leave, and how they go on where they stopped."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.calls import MACHINE_SECONDS
from benchmarks.gpu.plans import GPU_TESTS, SMOKE, TRITON_TESTS, stages_of
from benchmarks.gpu.stages import DONE, GRACE, LEFT_OUT, Ledger

ROOT = Path(__file__).parent.parent.parent
MOST_FILES = 8
MOST_SECONDS = 9.5 * 60


def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), *arguments]
    variables = own | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=variables)


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is made for Linux on x86-64 alone"
)


@needs_triton
def test_a_call_and_the_same_call_again(tmp_path: Path) -> None:
    out, kernel, brought = tmp_path / "out", tmp_path / "kernel.cubin", tmp_path / "brought.tar.gz"
    kernel.write_bytes(b"compiled elsewhere; the interpreter compiles nothing")
    with tarfile.open(brought, "w:gz") as archive:
        archive.add(kernel, "key/kernel.cubin")
    result = call("tests", str(out), "--miniature", TRITON_ARCHIVE=str(brought))
    assert result.returncode == 0, result.stdout + result.stderr + (out / "logs.txt").read_text()[-3000:]
    found: dict[str, Any] = json.loads((out / "figures.json").read_text())["tests"]
    states = {name: entry["state"] for name, entry in found.items()}
    assert states == {"triton": DONE, "memcheck": LEFT_OUT, "tune": DONE}
    assert found["tune"]["report"]["chosen"]
    assert result.stdout.endswith((out / "table.txt").read_text())
    assert "goal" in result.stdout
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) <= MOST_FILES
    assert max(len(path.relative_to(out).parts) for path in files) <= 3
    with tarfile.open(out / "triton.tar.gz") as archive:
        assert any(name.endswith(".cubin") for name in archive.getnames())
    assert all(title in (out / "logs.txt").read_text() for title in ("==== tests: triton", "==== tests: tune"))

    (tmp_path / "half.tar.gz").write_bytes((out / "triton.tar.gz").read_bytes()[:100])
    again = call("tests", str(out), "--miniature", TRITON_ARCHIVE=str(tmp_path / "half.tar.gz"))
    assert again.returncode == 0
    assert "kernels are compiled anew" in again.stdout
    assert again.stdout.count("done before") == 2


@needs_triton
def test_stages_of_figures_run_on_a_cpu(tmp_path: Path) -> None:
    """In this process, which saves them their imports."""
    stages = stages_of("figures", Ledger(tmp_path), miniature=True)
    assert [stage.name for stage in stages] == ["warm", "smoke", "engine", "kernels"]
    for stage in stages:
        _, _, module, *arguments = stage.command
        if module == "pytest":
            assert (ROOT / arguments[-1].partition("::")[0]).exists()
            continue
        save = ["--save", str(tmp_path / stage.name)] if stage.saves else []
        assert importlib.import_module(module).main([*arguments, *save]) == 0, stage.name
        assert not stage.saves or json.loads((tmp_path / stage.name).read_text())["rows"]


def test_what_cannot_be_run_is_refused(tmp_path: Path) -> None:
    result = call("figures", str(tmp_path), "--miniature", "--redo", "kernel")
    assert result.returncode == 1
    assert "figures has no stage kernel: it has warm, smoke, engine, kernels" in result.stderr
    assert call().returncode == 2
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, and the script would use it for ten minutes")
    result = call("figures", str(tmp_path / "out"))
    assert result.returncode == 2
    assert "no NVIDIA GPU that torch can use" in result.stderr
    assert "torch sees no GPU" in (tmp_path / "out" / "logs.txt").read_text()


@pytest.mark.parametrize("name", ["figures", "tests", "again"])
def test_every_call_ends_in_time(tmp_path: Path, name: str) -> None:
    stages = stages_of(name, Ledger(tmp_path), miniature=False)
    assert len({stage.name for stage in stages}) == len(stages)
    assert all(set(stage.name) <= set("abcdefghijklmnopqrstuvwxyz_") for stage in stages)
    assert sum(stage.seconds for stage in stages) + MACHINE_SECONDS + GRACE <= MOST_SECONDS


def test_every_test_of_the_gpu_is_run() -> None:
    files = {path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files == {*SMOKE, *GPU_TESTS}
    assert list(GPU_TESTS)[-1] == "test_memory_on_gpu"
    assert sum(GPU_TESTS.values()) == 325
    assert all((ROOT / path).exists() for path in TRITON_TESTS)
