"""The kernels as other CPUs get them: with AMX tiles (emulated), without AVX-512, without AVX. And under a sanitizer."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import shapes
from tests.kernels.builds import Build, accepts, compile_into, compiler, flags_for

ROOT = Path(__file__).parent.parent.parent

NEEDS = {"x86-64-v2": {"sse4_2", "ssse3", "popcnt"}, "x86-64-v3": {"avx2", "fma", "f16c", "bmi2"}}
"""What a CPU must have to run what was compiled for another, as /proc/cpuinfo calls it."""


# ---- AMX


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Build:
    names = ("linear", "attention_write", "attention_prefill")
    return Build(compile_into(tmp_path_factory.mktemp("amx"), flags_for("native", "-DEMULATE_AMX"), names))


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


def test_prefill_in_tiles(emulated: Build) -> None:
    shapes.check_prefill(emulated)


def test_the_sources_compile_for_a_cpu_with_amx(tmp_path: Path) -> None:
    compiler()
    if not accepts("-march=sapphirerapids"):
        pytest.skip("this compiler does not know -march=sapphirerapids")
    compile_into(tmp_path, flags_for("sapphirerapids", "-O0"))


# ---- CPUs with less


@pytest.fixture(scope="module", params=list(NEEDS))
def portable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Build:
    compiler()
    if not accepts(f"-march={request.param}"):
        pytest.skip(f"this compiler does not know -march={request.param}")
    if platform.machine() != "x86_64" or not NEEDS[request.param] <= cpu_flags():
        pytest.skip(f"this CPU does not run {request.param}")
    return Build(compile_into(tmp_path_factory.mktemp(request.param), flags_for(request.param, "-O2")))


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


def test_draws_of_a_portable_build(portable: Build) -> None:
    shapes.check_draws(portable)


def test_prefill_of_a_portable_build(portable: Build) -> None:
    shapes.check_prefill(portable)


def test_decode_of_a_portable_build(portable: Build) -> None:
    shapes.check_decode(portable)


# ---- memory


@pytest.mark.parametrize("emulated", [(), ("-DEMULATE_AMX",)], ids=["vectors", "tiles"])
def test_no_kernel_reads_or_writes_outside_of_its_tensors(emulated: tuple[str, ...], tmp_path: Path) -> None:
    command = [compiler(), "-print-file-name=libasan.so"]
    library = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not os.path.isabs(library) or not accepts("-fsanitize=address"):
        pytest.skip("this compiler has no address sanitizer that can be loaded first")
    architecture = "x86-64-v3" if NEEDS["x86-64-v3"] <= cpu_flags() else "native"
    flags = flags_for(architecture, "-O1", "-g1", *emulated, "-fsanitize=address")
    folder = compile_into(tmp_path, flags)["linear"].parent
    environment = os.environ | {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}
    run = [sys.executable, "-m", "tests.kernels.sanitized", str(folder)]
    result = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "nothing was found", result.stdout + result.stderr[:4000]
