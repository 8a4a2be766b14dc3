"""The kernels as other CPUs get them: with AMX tiles (emulated), with AVX-512, AVX2 or SSE. And under a sanitizer."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanoengine.kernels.compiler import SOURCES, cache_folder, compile_library
from tests.attention.test_one_number import check_one_number
from tests.kernels import shapes
from tests.kernels.builds import Build, accepts, compile_into, compiler, flags_for
from tests.kernels.machine_code import inner_loops

ROOT = Path(__file__).parent.parent.parent

NEEDS = {
    "x86-64-v2": {"sse4_2", "ssse3", "popcnt"},
    "x86-64-v3": {"avx2", "fma", "f16c", "bmi2"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
}
"""What a CPU must have to run what was compiled for another, as /proc/cpuinfo calls it."""

REGISTERS = {"x86-64-v3": "ymm", "x86-64-v4": "zmm", "sapphirerapids": "zmm"}
"""Targets whose machine code is read, and their vectors: AVX2, AVX-512, and that with bfloat16 and AMX."""


def compiled(target: str) -> Path:
    """The kernels for a target, in the way in which users compile them, and kept where theirs are."""
    if platform.machine() != "x86_64" or not accepts(f"-march={target}"):
        pytest.skip(f"this compiler does not know -march={target}")
    return compile_library(SOURCES, compiler(), flags_for(target), cache_folder())


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

LIMITS = {"multiply_cells<": (1 / 16, 1 / 12), "::gate<": (0, 1 / 4)}
"""Parts of names of functions -> how many of an inner loop's instructions may store to the stack, and load from it.

Quantized numbers are put together in registers that some of the sums then lack. AVX2 has too few for the constants of gates.
"""


@pytest.mark.parametrize("target", REGISTERS)
def test_no_inner_loop_keeps_a_vector_on_the_stack(target: str) -> None:
    """Sums stay in registers. A constant may be read from the stack: it is no slower there than anywhere else in memory."""
    if shutil.which("objdump") is None:
        pytest.skip("there is no objdump")
    register = REGISTERS[target]
    loops = [loop for loop in inner_loops(compiled(target)) if loop.multiplies(register)]
    for name in MULTIPLYING:
        assert any(name in loop.function for loop in loops), f"{name} does not multiply in {register} registers"
    for loop in loops:
        if any(re.search(r"<mem(cpy|set)@plt>", line) for line in loop.code):
            continue  # at the end of a row: no register outlives a call
        stored, loaded = next((limits for name, limits in LIMITS.items() if name in loop.function), (0, 1 / 20))
        shown = f"{loop.function}\n" + "\n".join(loop.code)
        assert loop.stores(register) <= len(loop.code) * stored, shown
        assert loop.loads(register) <= max(1, len(loop.code) * loaded), shown


def test_vectors_wider_than_the_registers_are_found_on_the_stack(tmp_path: Path) -> None:
    compiler()
    if shutil.which("objdump") is None or platform.machine() != "x86_64":
        pytest.skip("there is no objdump for x86-64")
    (tmp_path / "wide.cpp").write_text(WIDE)
    library = compile_library(tmp_path, compiler(), flags_for("x86-64-v3"), tmp_path / "libraries")
    assert sum(loop.stores("ymm") for loop in inner_loops(library) if loop.multiplies("ymm"))


WIDE = """
typedef float F16 __attribute__((vector_size(64)));
extern "C" void f(const F16* a, const float* b, F16* out, int n) {
    F16 sums[12] = {};
    for (int i = 0; i < n; i++)
        for (int m = 0; m < 12; m++) sums[m] += a[i] * b[12 * i + m];
    for (int m = 0; m < 12; m++) out[m] = sums[m];
}
"""


# ---- AMX


EMULATED = ("linear", "pack", "attention_write", "attention_prefill", "attention_decode")
"""Sources that use tiles, or prepare what others do."""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return Build(compile_into(tmp_path_factory.mktemp("amx"), flags_for("native", "-DEMULATE_AMX"), EMULATED))


@pytest.mark.parametrize("inputs", [32, 64, 96, 192, 256])
def test_tiles_of_any_number_of_rows(emulated: Build, inputs: int) -> None:
    """A tile is 16 dwords deep: 32 inputs of bfloat16."""
    shapes.check_linear(emulated, inputs, rows=list(range(1, 71)))


@pytest.mark.parametrize("inputs", [1, 2, 16, 30, 31, 33, 48, 95])
def test_sums_that_are_no_multiple_of_a_tile(emulated: Build, inputs: int) -> None:
    shapes.check_linear(emulated, inputs)


@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 31, 32, 33, 100])
def test_any_number_of_outputs_in_tiles(emulated: Build, outputs: int) -> None:
    shapes.check_linear(emulated, 64, outputs, [1, 15, 16, 17, 32, 33, 100])


@pytest.mark.parametrize("inputs", [64, 80])
def test_a_row_in_tiles_is_the_same_in_batches_of_every_size(emulated: Build, inputs: int) -> None:
    shapes.check_batches(emulated, inputs)


def test_gates_in_tiles(emulated: Build) -> None:
    shapes.check_gated(emulated)


def test_experts_in_tiles(emulated: Build) -> None:
    shapes.check_experts(emulated)


def test_prefill_in_tiles(emulated: Build) -> None:
    shapes.check_prefill(emulated)


def test_decode_in_tiles(emulated: Build) -> None:
    shapes.check_decode(emulated)


def test_an_int8_cache_in_tiles(emulated: Build) -> None:
    shapes.check_int8(emulated)


def test_attention_in_tiles_is_the_same_in_every_way(emulated: Build) -> None:
    """A tile adds up 32 tokens before it adds them to a sum: wherever a token is computed, they must be the same 32."""
    for seed in range(30):
        check_one_number(emulated.attention, seed, ways=4)


# ---- vectors


@pytest.fixture(scope="module", params=list(NEEDS))
def portable(request: pytest.FixtureRequest) -> Build:
    if not NEEDS[request.param] <= cpu_flags():
        pytest.skip(f"this CPU does not run {request.param}")
    return Build(compiled(request.param))


def cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


@pytest.mark.parametrize("inputs", [1, 31, 32, 33, 96, 200])
def test_linear_of_a_portable_build(portable: Build, inputs: int) -> None:
    shapes.check_linear(portable, inputs)


def test_batches_of_a_portable_build(portable: Build) -> None:
    shapes.check_batches(portable, 75)


def test_embed_of_a_portable_build(portable: Build) -> None:
    shapes.check_embed(portable)


def test_norm_of_a_portable_build(portable: Build) -> None:
    shapes.check_norm(portable)


def test_gates_of_a_portable_build(portable: Build) -> None:
    shapes.check_gated(portable)


def test_experts_of_a_portable_build(portable: Build) -> None:
    shapes.check_experts(portable)


def test_quantized_products_of_a_portable_build(portable: Build) -> None:
    shapes.check_quantized(portable)
    shapes.check_mixed(portable)
    shapes.check_extremes(portable)


def test_quantized_experts_of_a_portable_build(portable: Build) -> None:
    shapes.check_quantized_experts(portable)


def test_draws_of_a_portable_build(portable: Build) -> None:
    shapes.check_draws(portable)


def test_prefill_of_a_portable_build(portable: Build) -> None:
    shapes.check_prefill(portable)


def test_decode_of_a_portable_build(portable: Build) -> None:
    shapes.check_decode(portable)


def test_an_int8_cache_of_a_portable_build(portable: Build) -> None:
    shapes.check_int8(portable)


def test_attention_of_a_portable_build_is_the_same_in_every_way(portable: Build) -> None:
    for seed in range(20):
        check_one_number(portable.attention, seed, ways=4)


# ---- memory


def test_no_kernel_reads_or_writes_outside_of_its_tensors(tmp_path: Path) -> None:
    """In vectors of AVX2, and in tiles."""
    command = [compiler(), "-print-file-name=libasan.so"]
    library = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not os.path.isabs(library) or not accepts("-fsanitize=address"):
        pytest.skip("this compiler has no address sanitizer that can be loaded first")
    flags = flags_for(
        "x86-64-v3" if NEEDS["x86-64-v3"] <= cpu_flags() else "native", "-O1", "-g1", "-fsanitize=address"
    )
    vectors = compile_into(tmp_path / "vectors", flags)
    tiles = compile_into(tmp_path / "tiles", (*flags, "-DEMULATE_AMX"), EMULATED)
    environment = os.environ | {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}
    run = [sys.executable, "-m", "tests.kernels.sanitized", str(vectors), str(tiles)]
    result = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "nothing was found", result.stdout + result.stderr[:4000]
