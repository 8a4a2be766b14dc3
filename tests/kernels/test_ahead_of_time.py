"""Triton kernels compile for A100, H100 and B200, and fit them, as far as a few launches of each show; no GPU is needed.

`python -m tests.kernels.ahead_of_time` compiles every launch for all three: run it after a change to a kernel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux on x86-64 alone")

from tests.kernels.ahead_of_time import OURS, SHARED_MEMORY, VARIANTS, Compiled
from tests.kernels.noting import kernels, modules

ROOT = Path(__file__).parents[2]

GREEDY = '''
import torch
import triton
import triton.language as tl


@triton.jit
def multiply_kernel(a, b, c, count, SIZE: tl.constexpr):
    """Several tiles of each operand wait in shared memory."""
    i = tl.arange(0, SIZE)
    square = i[:, None] * SIZE + i[None, :]
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for _ in range(count):
        total = tl.dot(tl.load(a + square), tl.load(b + square), total)
        a += SIZE * SIZE
        b += SIZE * SIZE
    tl.store(c + square, total)


@triton.jit
def normalize_kernel(a, SIZE: tl.constexpr):
    """All numbers stay in the registers of one warp until their sum is known."""
    i = tl.arange(0, SIZE)
    x = tl.load(a + i)
    tl.store(a + i, x / tl.sum(x))


@triton.jit
def misspell_kernel(a, SIZE: tl.constexpr):
    tl.store(a + tl.arange(0, SIZE), wrong_name)


def launch_all():
    half, full = (torch.empty(16, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.float32))
    multiply_kernel[(1,)](half, half, full, 9, SIZE=128, num_warps=8, num_stages=6)
    normalize_kernel[(1,)](full, SIZE=16384, num_warps=1)
    misspell_kernel[(1,)](full, SIZE=16)
'''
"""Kernels that want more than any chip has, and one that is none."""


def compile_all(arguments: Sequence[str], *more_paths: Path) -> list[Compiled]:
    """Compile in a process of its own: this one may have loaded the kernels for the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [ROOT, *more_paths]))
    command = [sys.executable, "-m", "tests.kernels.ahead_of_time", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1), result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout, result.stderr[-3000:]
    return [Compiled(**json.loads(line)) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    """Some launches of all kernels, and those of the greedy ones: to start the processes takes longer than most kernels.

    The two tests of them stand side by side, so that one process of several runs both.
    """
    folder = tmp_path_factory.mktemp("greedy")
    (folder / "greedy_kernels.py").write_text(GREEDY)
    return compile_all(["--some", OURS, "greedy_kernels"], folder)


def test_launches_of_all_kernels_compile_and_fit_their_chips(compiled: list[Compiled]) -> None:
    own = {name for module in modules() for name in kernels(module)}
    ours = [launch for launch in compiled if launch.kernel in own]
    faults = [
        f"{launch.launch} on sm_{launch.architecture}{', aligned' * launch.aligned}: {fault}"
        for launch in ours
        for fault in launch.faults()
    ]
    assert not faults, "\n".join(faults)
    assert {launch.kernel for launch in ours} == own
    assert {(launch.architecture, launch.aligned) for launch in ours} == set(VARIANTS)


def test_kernels_that_take_too_much_or_do_not_compile_are_found_out(compiled: list[Compiled]) -> None:
    for name, fault in (
        ("multiply_kernel", "bytes of shared memory, and the chip has"),
        ("normalize_kernel", "bytes of registers are spilled"),
        ("misspell_kernel", "wrong_name is not defined"),
    ):
        faults = ["\n".join(launch.faults()) for launch in compiled if launch.kernel == name and launch.aligned]
        assert len(faults) == len(SHARED_MEMORY)
        assert all(fault in found for found in faults), faults


@pytest.mark.parametrize(("registers", "tensor_memory"), [(256, 0), (255, 513)])
def test_more_registers_or_tensor_memory_than_there_are_is_a_fault(registers: int, tensor_memory: int) -> None:
    fits = Compiled("module", "launch", 100, True, registers=255, shared=227 << 10, tensor_memory=512)
    assert not fits.faults()
    assert Compiled("module", "launch", 100, True, registers=registers, tensor_memory=tensor_memory).faults()
