"""Triton kernels compile for A100, H100 and B200, and fit them, as far as a few launches of each show; no GPU is needed.

`python -m tests.kernels.ahead_of_time` compiles every launch for all three: run it after a change to a kernel.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kernels.ahead_of_time import SHARED_MEMORY, VARIANTS, Compiled, jobs_of, modules

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: it is made for Linux on x86-64 alone"
)

WITHOUT_HALF = {"compute_slot_mapping", "candidates", "filters", "sampling"}
"""Modules whose kernels take token ids, or logits, which are float32 whatever the model's dtype."""

GREEDY = '''
import triton
import triton.language as tl

from nanoengine.kernels.triton.launch import Launch


@triton.jit
def multiply(a, b, c, count, SIZE: tl.constexpr):
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
def normalize(a, SIZE: tl.constexpr):
    """All numbers stay in the registers of one warp until their sum is known."""
    i = tl.arange(0, SIZE)
    x = tl.load(a + i)
    tl.store(a + i, x / tl.sum(x))


@triton.jit
def misspell(a, SIZE: tl.constexpr):
    tl.store(a + tl.arange(0, SIZE), wrong_name)


def launches():
    operands = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "count": "i32", "SIZE": "constexpr"}
    numbers = {"a": "*fp32", "SIZE": "constexpr"}
    return [
        Launch("multiply", multiply, operands, {"SIZE": 128}, num_warps=8, num_stages=6),
        Launch("normalize", normalize, numbers, {"SIZE": 16384}, num_warps=1),
        Launch("misspell", misspell, numbers, {"SIZE": 16}),
    ]
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
    """Some launches of all modules, and those of the greedy one: to start the processes takes longer than most kernels.

    The two tests of them stand side by side, so that one process of several runs both.
    """
    folder = tmp_path_factory.mktemp("greedy")
    (folder / "greedy_kernels.py").write_text(GREEDY)
    return compile_all(["--some", *modules(), "greedy_kernels"], folder)


def test_launches_compile_and_fit_their_chips(compiled: list[Compiled]) -> None:
    ours = [launch for launch in compiled if launch.module != "greedy_kernels"]
    faults = [
        f"{launch.launch} on sm_{launch.architecture}{', aligned' * launch.aligned}: {fault}"
        for launch in ours
        for fault in launch.faults()
    ]
    assert not faults, "\n".join(faults)
    assert {launch.module for launch in ours} == set(modules())
    assert {(launch.architecture, launch.aligned) for launch in ours} == set(VARIANTS)


def test_kernels_that_take_too_much_or_do_not_compile_are_found_out(compiled: list[Compiled]) -> None:
    faults: dict[str, list[str]] = {}
    for launch in compiled:
        if launch.module == "greedy_kernels" and launch.aligned:
            faults.setdefault(launch.launch, []).append("\n".join(launch.faults()))
    for name, fault in (
        ("multiply", "bytes of shared memory, and the chip has"),
        ("normalize", "bytes of registers are spilled"),
        ("misspell", "wrong_name is not defined"),
    ):
        assert len(faults[name]) == len(SHARED_MEMORY)
        assert all(fault in found for found in faults[name]), faults[name]


@pytest.mark.parametrize("module", modules())
def test_every_launch_has_a_name_and_is_compiled_for_every_chip_that_it_is_for(module: str) -> None:
    launches = importlib.import_module(module).launches()
    assert len({launch.name for launch in launches}) == len(launches), "two launches have the same name"
    jobs = jobs_of(module, some=False)
    assert (
        len(set(jobs)) == len(jobs) == sum(len([v for v in VARIANTS if v[0] >= x.least_capability]) for x in launches)
    )


@pytest.mark.parametrize("module", modules())
def test_every_module_offers_launches_in_both_half_precisions_if_it_takes_any(module: str) -> None:
    kinds = {
        kind.removeprefix("*") for x in importlib.import_module(module).launches() for kind in x.signature.values()
    }
    missing = {"bf16", "fp16"} - kinds
    assert not missing or module.rpartition(".")[2] in WITHOUT_HALF, f"{module} offers {sorted(kinds)} alone"


@pytest.mark.parametrize(("registers", "tensor_memory"), [(256, 0), (255, 513)])
def test_more_registers_or_tensor_memory_than_there_are_is_a_fault(registers: int, tensor_memory: int) -> None:
    fits = Compiled("module", "launch", 100, True, registers=255, shared=227 << 10, tensor_memory=512)
    assert not fits.faults()
    assert Compiled("module", "launch", 100, True, registers=registers, tensor_memory=tensor_memory).faults()
