"""The kernels as other CPUs get them: with AVX-512, AVX2 or SSE, or with AMX tiles (emulated). And under a sanitizer."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanoengine.kernels.native.compiler import PREBUILT_TARGETS
from nanoengine.kernels.native.target import missing_features
from tests.kernels import formulas
from tests.kernels.builds import QUICK, SANITIZED, Build, accepts, check_attention, compiled, compiler, flags_for
from tests.kernels.contract import (
    OF_THE_LIBRARY,
    Case,
    Kind,
    Operation,
    check_operation,
    dequantized,
    experts,
    extremes,
    gated_linear,
    id_of,
    linear,
)
from tests.kernels.machine_code import Loop, inner_loops
from tests.kernels.recurrences import check_recurrences

Make = Callable[[Case], Operation]

ROOT = Path(__file__).parent.parent.parent

SSE, AVX2 = "x86-64-v2", "x86-64-v3"

REGISTERS = {"x86-64-v3": "ymm", "x86-64-v4": "zmm", "sapphirerapids": "zmm"}
"""Targets whose machine code is read, and their vectors: AVX2, AVX-512, and that with bfloat16 and AMX."""

TILED = ("linear", "pack", "rotate_and_write", "attention_prefill", "attention_decode")
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
    "attention_prefill",
    "_rotate<",
    "rms_norm",
    "sum_exp",
)
"""Parts of the names of functions whose inner loops multiply, one for each source that has such."""

WITH_TILES = ("Rows<", "Decode<", "attention_prefill", "dequantize_cells<")
"""The same, of what differs on CPUs with AMX."""

LIMITS = {"multiply_cells<": (1 / 16, 1 / 10), "gate_pairs<": (0, 1 / 4), "::columns<": (1 / 25, 1 / 10)}
LIMITS |= dict.fromkeys(("short_conv", "rms_norm", "gated_norm", "sigmoid_gate"), (1 / 16, 1 / 10))
"""Parts of names of functions -> how many of an inner loop's instructions may store to the stack, and load from it.

Quantized numbers are put together in registers that some of the sums then lack. AVX2 has too few for the constants of gates.
In norms and layers with states, ends of rows that fill no vector go through the stack, and so do the taps of a convolution.
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
        if any(re.search(r"<mem(cpy|set)@plt>|rep movs", line) for line in loop.code):
            continue  # copies what is left at the end of a row, by way of the stack
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


# ---- AMX


@pytest.fixture(scope="module")
def emulated() -> Build:
    if platform.machine() != "x86_64":
        pytest.skip("the emulation sets a register of x86")
    return Build(compiled(flags_for("native", QUICK, "-DEMULATE_AMX"), TILED))


@pytest.mark.parametrize("make", [linear, gated_linear, experts], ids=id_of)
def test_operations_in_tiles(emulated: Build, make: Make) -> None:
    """A tile is 16 dwords deep: 32 inputs of bfloat16. Any other number of them is multiplied in vectors."""
    kind = Kind([emulated], (130, 256, 100), (torch.bfloat16,), formats=())
    check_operation(make, kind, range(25))
    check_operation(make, replace(kind, edges=(32, 64, 96, 192, 256)), range(60, 75))
    check_operation(make, replace(kind, most=(900, 1100, 70), edges=(97, 384, 385, 544, 800, 1056)), range(90, 94))


def test_rows_of_a_large_output_are_those_of_a_small_one(emulated: Build) -> None:
    """Large ones are written past the caches, which takes other instructions."""
    x = formulas.random(1100, 32, dtype=torch.bfloat16, seed=1)
    for outputs in (1024, 1000):  # whole lines, and lines that are not
        both = emulated.new_weight(2 * outputs, 32, torch.bfloat16, torch.device("cpu"))
        both.rows(0, 2 * outputs).copy_(formulas.random(2 * outputs, 32, dtype=torch.bfloat16, seed=2))
        assert torch.equal(
            emulated.linear(x, both, None), torch.cat([emulated.linear(some, both, None) for some in x.split(100)])
        )
        assert torch.equal(
            emulated.product(x, both, activation="silu")[0],
            torch.cat([emulated.product(some, both, activation="silu")[0] for some in x.split(100)]),
        )


@pytest.mark.parametrize("make", [linear, gated_linear, experts, extremes, dequantized], ids=id_of)
def test_quantized_operations_in_tiles(emulated: Build, make: Make) -> None:
    """Numbers of every format become bfloat16 there, for one row as for many."""
    assert emulated.activation_dtype == "bfloat16"
    kind = Kind([emulated], (130, 600, 100), edges=(1, 2, 4, 5, 16, 17, 31, 32, 33, 48, 49, 64, 65, 96, 97, 129))
    check_operation(make, kind, range(16))


def test_attention_in_tiles(emulated: Build) -> None:
    """A tile adds up 32 tokens before it adds them to a sum: wherever a token is computed, they must be the same 32."""
    check_attention(emulated, range(16))


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


def test_no_kernel_reads_or_writes_outside_of_its_tensors() -> None:
    """And all is computed right: in vectors of SSE, which are as wide as those of NEON, and in tiles with vectors of AVX2."""
    command = [compiler(), "-print-file-name=libasan.so"]
    library = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not os.path.isabs(library) or not accepts(*SANITIZED):
        pytest.skip("this compiler has no address sanitizer that can be loaded first")
    is_x86 = platform.machine() == "x86_64"
    has_avx2 = is_x86 and not missing_features(PREBUILT_TARGETS["x86_64"][AVX2])
    vectors = compiled(flags_for(SSE if is_x86 else "native", *SANITIZED))
    tiles = compiled((*flags_for(AVX2 if has_avx2 else "native", *SANITIZED), "-DEMULATE_AMX"), TILED)
    environment = os.environ | {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}
    run = [sys.executable, "-m", "tests.kernels.sanitized", str(vectors), str(tiles)]
    result = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "nothing was found", result.stdout + result.stderr[:4000]
