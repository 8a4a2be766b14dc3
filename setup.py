"""Building a wheel: where there is a compiler, it gets the native kernels compiled for a few kinds of CPU, for machines that have
none. Everything else is in pyproject.toml.

They name no C++ library: it is inside them. Without a compiler, or if it fails, the wheel is pure, and for all platforms. An
installation in place (-e) gets none either.
"""

from __future__ import annotations

import platform
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
KERNELS = ROOT / "nanoengine" / "kernels" / "native"
compiler = runpy.run_path(str(KERNELS / "compiler.py"))  # alone: the package around it needs what is not installed yet
LINK = ("-s", "-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections")


class BuildWithKernels(build_py):
    """The package, and in a wheel its prebuilt kernels."""

    @property
    def prebuilt(self) -> Path:
        return Path(self.build_lib, compiler["PREBUILT"].relative_to(ROOT))

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        shutil.rmtree(self.prebuilt, ignore_errors=True)  # of an earlier build
        try:
            prebuild(self.prebuilt)
        except (compiler["CannotCompile"], OSError) as error:
            shutil.rmtree(self.prebuilt, ignore_errors=True)
            print(f"warning: a wheel without prebuilt kernels: {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """For any Python 3; for this platform alone if it holds prebuilt kernels."""

    def run(self) -> None:
        self.run_command("build")
        if self.get_finalized_command("build_py").prebuilt.is_dir():
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # they are not built as such, but lie in the same place
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def prebuild(folder: Path) -> None:
    """Compile the kernels for every target of this machine: folder/TARGET/kernels.so.

    Raises:
        CannotCompile, OSError: the compiler is missing, or fails.
    """
    targets = compiler["PREBUILT_TARGETS"].get(platform.machine(), {})
    if not targets or sys.platform != "linux":
        return
    program = compiler["find_compiler"]()
    with tempfile.TemporaryDirectory() as workplace:
        for target in targets:
            flags = *compiler["flags_for"](target), *LINK
            library = compiler["compile_library"](compiler["SOURCES"], program, flags, Path(workplace))
            (folder / target).mkdir(parents=True)
            shutil.copy(library, folder / target)


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
