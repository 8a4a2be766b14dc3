"""The kernels as other CPUs get them: with AVX-512, AVX2 or SSE, or with AMX tiles (emulated). And under a sanitizer."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nanoengine.kernels.native.compiler import PREBUILT_TARGETS
from nanoengine.kernels.native.target import missing_features
from tests.kernels.builds import SANITIZED, Build, accepts, check_attention, compiled, compiler, flags_for
from tests.kernels.contract import OF_THE_LIBRARY, Case, Kind, Operation, check_operation, id_of
from tests.kernels.machine_code import Loop, inner_loops
from tests.kernels.recurrences import check_recurrences

Make = Callable[[Case], Operation]

ROOT = Path(__file__).parent.parent.parent

SSE = "x86-64-v2"

REGISTERS = {"x86-64-v3": "ymm", "x86-64-v4": "zmm", "sapphirerapids": "zmm"}
"""Targets whose machine code is read, and their vectors: AVX2, AVX-512, and that with bfloat16 and AMX."""

TILED = ("linear", "pack", "attention_write", "attention_prefill", "attention_decode")
"""Sources that use tiles, or prepare what others do."""


def compiled_for(target: str, request: pytest.FixtureRequest) -> Path:
    """The kernels for a target, as users compile them. Those of this CPU, which are compiled anyway, may stand for them."""
    if platform.machine() != "x86_64" or not accepts(f"-march={target}"):
        pytest.skip(f"this compiler does not know -march={target}")
    if not request.config.getoption("--all-targets"):
        if target == "x86-64-v4" and not missing_features(PREBUILT_TARGETS["x86_64"][target]):
            return compiled(flags_for("native"))
        if target == "sapphirerapids":
            pytest.skip("--all-targets reads the machine code for AMX, too")
    return compiled(flags_for(target), TILED if target == "sapphirerapids" else ())


# ---- machine code


MULTIPLYING = (
    "Rows<",
    "multiply_cells<",
    "dequantize_cells<",
    "Decode<",
    "prefill<",
    "_rotate<",
    "rms_norm",
    "sum_exp",
)
"""Parts of the names of functions whose inner loops multiply, one for each source that has such."""

WITH_TILES = ("Rows<", "Decode<", "prefill<", "dequantize_cells<", "add_as_tiles<")
"""The same, of what differs on CPUs with AMX."""

LIMITS = {"multiply_cells<": (1 / 16, 1 / 10), "gate_pairs<": (0, 1 / 4), "::columns<": (1 / 25, 1 / 10)}
LIMITS |= dict.fromkeys(("::conv<", "::norm<", "4normI", "gated_norm", "sigmoid_gate"), (1 / 16, 1 / 10))
"""Parts of names of functions -> how many of an inner loop's instructions may store to the stack, and load from it.

Quantized numbers are put together in registers that some of the sums then lack. AVX2 has too few for the constants of gates.
In layers with states, ends of rows that fill no vector go through the stack, and so do the taps of a convolution.
"""


@pytest.mark.parametrize("target", REGISTERS)
def test_no_inner_loop_keeps_a_vector_on_the_stack(target: str, request: pytest.FixtureRequest) -> None:
    """Sums stay in registers. A constant may be read from the stack: it is no slower there than anywhere else in memory."""
    if shutil.which("objdump") is None:
        pytest.skip("there is no objdump")
    register = REGISTERS[target]
    loops = [loop for loop in inner_loops(compiled_for(target, request)) if loop.multiplies(register)]
    for name in WITH_TILES if target == "sapphirerapids" else MULTIPLYING:
        assert any(name in loop.function for loop in loops), f"{name} does not multiply in {register} registers"
    for loop in loops:
        if any(re.search(r"<mem(cpy|set)@plt>", line) for line in loop.code):
            continue  # at the end of a row: no register outlives a call
        stored, loaded = next((limits for name, limits in LIMITS.items() if name in loop.function), (0, 1 / 20))
        shown = f"{loop.function}\n" + "\n".join(loop.code)
        assert loop.stores(register) <= len(loop.code) * stored, shown
        assert loop.loads(register) <= max(1, len(loop.code) * loaded), shown


def test_what_goes_to_the_stack_and_comes_from_there_is_counted() -> None:
    code = (
        "vmovaps %ymm3,0x20(%rsp)",
        "vmulps -0x8(%rbp),%ymm1,%ymm2",
        "vmovups %ymm3,0x20(%rax)",
        "vmovaps (%rsp,%rax,1),%ymm4",
    )
    loop = Loop("f", code)
    assert loop.multiplies("ymm")
    assert not loop.multiplies("zmm")
    assert (loop.stores("ymm"), loop.loads("ymm")) == (1, 1)


# ---- vectors


@pytest.fixture(scope="module", params=["x86-64-v3", "x86-64-v4"])
def portable(request: pytest.FixtureRequest) -> Build:
    if platform.machine() != "x86_64" or missing_features(PREBUILT_TARGETS["x86_64"][request.param]):
        pytest.skip(f"this CPU does not run {request.param}")
    if request.param == "x86-64-v4" and not request.config.getoption("--all-targets"):
        pytest.skip("other tests compute with what is compiled for this CPU; --all-targets computes with this, too")
    return Build(compiled_for(request.param, request))


@pytest.mark.parametrize("make", OF_THE_LIBRARY, ids=id_of)
def test_operations_of_a_portable_build(portable: Build, make: Make) -> None:
    check_operation(make, Kind(portable.in_all_ways()), range(1000, 1020))


def test_attention_of_a_portable_build(portable: Build) -> None:
    check_attention(portable, range(100, 130))


def test_recurrences_of_a_portable_build(portable: Build) -> None:
    for seed in range(100, 110):
        check_recurrences(portable, seed)


# ---- memory


@pytest.mark.parametrize("way", ["vectors", "tiles"])
def test_kernels_compute_right_and_touch_nothing_outside_of_their_tensors(way: str) -> None:
    """In vectors of SSE, which are those of NEON in number and width; and in tiles of AMX, emulated beside this CPU's vectors."""
    if platform.machine() != "x86_64" and way == "tiles":
        pytest.skip("few rows are multiplied in vectors of x86")
    command = [compiler(), "-print-file-name=libasan.so"]
    library = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not os.path.isabs(library) or not accepts(*SANITIZED):
        pytest.skip("this compiler has no address sanitizer that can be loaded first")
    if way == "tiles":
        path = compiled(flags_for("native", *SANITIZED, "-DEMULATE_AMX"), TILED)
    else:
        path = compiled(flags_for(SSE if platform.machine() == "x86_64" else "native", *SANITIZED))
    environment = os.environ | {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}
    run = [sys.executable, "-m", "tests.kernels.sanitized", way, str(path)]
    result = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "nothing was found", result.stdout + result.stderr[-4000:]
