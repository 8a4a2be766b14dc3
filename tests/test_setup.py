"""Wheels: with prebuilt kernels and for this platform where there is a compiler, pure and for all where there is none."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from nanoengine.kernels.native.compiler import LIBRARY, PREBUILT_TARGETS, CannotCompile, find_compiler

pytest.importorskip("setuptools.command.bdist_wheel")

ROOT = Path(__file__).parent.parent
TARGETS = PREBUILT_TARGETS.get(platform.machine(), {})


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package that is built as ours is, of one small kernel."""
    kernels = tmp_path / "nanoengine" / "kernels" / "native"
    (kernels / "cpp").mkdir(parents=True)
    (kernels / "__init__.py").touch()
    (tmp_path / "nanoengine" / "__init__.py").touch()
    shutil.copy(ROOT / "nanoengine" / "kernels" / "native" / "compiler.py", kernels)
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "nanoengine"\nversion = "1"\n')
    (kernels / "cpp" / "tiny.cpp").write_text(
        '#include <string>\nextern "C" int answer(int n) { return (int)std::to_string(n).size(); }\n'
    )
    return tmp_path


def build_wheel(project: Path, **environment: str) -> tuple[str, list[str]]:
    """The name of the wheel, and the prebuilt kernels in it."""
    command = [sys.executable, "setup.py", "-q", "bdist_wheel"]
    subprocess.run(command, cwd=project, env=os.environ | environment, capture_output=True, check=True)
    (wheel,) = (project / "dist").iterdir()
    return wheel.name, sorted(name for name in ZipFile(wheel).namelist() if "prebuilt" in name)


def test_a_wheel_holds_kernels_for_every_target(project: Path) -> None:
    try:
        find_compiler()
    except CannotCompile as error:
        pytest.skip(str(error))
    if sys.platform != "linux" or not TARGETS:
        pytest.skip("only wheels for Linux hold any")
    name, prebuilt = build_wheel(project)
    assert name.startswith("nanoengine-1-py3-none-linux_")
    assert prebuilt == sorted(f"nanoengine/kernels/native/prebuilt/{target}/{LIBRARY}" for target in TARGETS)
    library = ZipFile(project / "dist" / name).read(prebuilt[0])
    assert b"answer" in library
    assert b"libstdc++" not in library, "it is inside"


@pytest.mark.parametrize("obstacle", ["no compiler", "a failing one"])
def test_without_a_compiler_it_is_pure(project: Path, obstacle: str) -> None:
    left = project / "build" / "lib" / "nanoengine" / "kernels" / "native" / "prebuilt" / "old" / LIBRARY
    left.parent.mkdir(parents=True)
    left.touch()  # by an earlier build
    name, prebuilt = build_wheel(project, CXX="/nowhere/c++" if obstacle == "no compiler" else "false")
    assert name == "nanoengine-1-py3-none-any.whl"
    assert not prebuilt
