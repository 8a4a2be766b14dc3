"""The kernels compiled in other ways than for this CPU, called through their C functions."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

from nanoengine.caches import cache_folder
from nanoengine.kernels.memory import Arena
from nanoengine.kernels.native.attention import NativeAttention
from nanoengine.kernels.native.c_functions import functions_of
from nanoengine.kernels.native.compiler import NATIVE, SOURCES, CannotCompile, compile_library, find_compiler
from nanoengine.kernels.native.compiler import flags_for as kernel_flags
from nanoengine.kernels.native.operations import NativeKernels
from tests.drawn import check_seeds
from tests.kernels.attention import every_backend
from tests.kernels.attention.contract import check_step, check_write
from tests.kernels.attention.test_one_number import check_one_number

QUICK = "-O1"
"""The last of such flags counts: for a build that is only to compute right, which takes half as long to make."""

SANITIZED = (QUICK, "-g1", "-fsanitize=address", "--param=asan-instrumentation-with-call-threshold=0")
"""Reads and writes are checked by calls, not by code in their place: that takes less than half as long to compile."""


@cache
def compiler() -> str:
    """Path of the compiler; the test that wants it is skipped where there is none, or it cannot compile the kernels."""
    try:
        path = find_compiler()
    except CannotCompile as error:
        pytest.skip(str(error))
    flags = kernel_flags(NATIVE)
    if not _accepts(path, flags):
        pytest.skip(f"{path} does not take {' '.join(flags)}")
    return path


@cache
def accepts(*flags: str) -> bool:
    """Whether the compiler knows these flags."""
    return _accepts(compiler(), flags)


def _accepts(path: str, flags: tuple[str, ...]) -> bool:
    command = [path, *flags, "-x", "c++", "-fsyntax-only", "-"]
    return subprocess.run(command, input="", capture_output=True, text=True, check=False).returncode == 0


def flags_for(architecture: str, *more: str) -> tuple[str, ...]:
    """The flags that kernels are compiled with, but for another architecture than this CPU's."""
    return *kernel_flags(architecture), *more


def compiled(flags: tuple[str, ...], names: Sequence[str] = ()) -> Path:
    """A library of all sources, or of those of these names and the threads that they need; kept where those of users are."""
    if not names:
        return compile_library(SOURCES, compiler(), flags, cache_folder("kernels"))
    with TemporaryDirectory() as folder:
        for path in SOURCES.iterdir():
            if path.suffix == ".h" or path.stem in (*names, "team"):
                shutil.copy(path, folder)
        shutil.copy(Path(__file__).with_name("amx_emulated.h"), folder)
        return compile_library(Path(folder), compiler(), flags, cache_folder("kernels"))


class Build(NativeKernels):
    """The kernels of a compiled library."""

    def __init__(self, path: Path, *, activation_dtype: str = "auto"):
        super().__init__(activation_dtype=activation_dtype, c=functions_of(path))
        self.path, self.packer.arena = path, Apart()

    def in_all_ways(self) -> tuple[Build, ...]:
        """As activations are rounded where they meet quantized weights."""
        return tuple(Build(self.path, activation_dtype=name) for name in ("int8", "int16", "bfloat16", "float32"))

    def attention(self, block_size: int) -> NativeAttention:
        return NativeAttention(block_size, c=self.c)


def check_attention(build: Build, seeds: Sequence[int]) -> None:
    """The contract of attention, and one number."""
    kind = replace(every_backend.NATIVE, work=200_000)

    def check(seed: int) -> None:
        check_step(kind, build.attention, seed)
        check_write(kind, build.attention, seed)
        if seed % 3 == 0:
            check_one_number(build.attention, seed, ways=4)

    check_seeds(check, seeds)


class Apart(Arena):
    """Gives every tensor memory of its own, so that a sanitizer watches its ends."""

    def zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)
