"""Machine code: a product asks for its weights before it waits for the kernel before, and for rows behind that; what it takes to
read numbers of 8 bits; and warps that are specialized.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux on x86-64 alone")

import triton

from tests.kernels.gpu_code import Code, disassembler

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def codes() -> list[Code]:
    return [Code(**line) for line in printed("tests.kernels.gpu_code")]


def printed(program: str) -> list[dict[str, Any]]:
    """Lines of a program that compiles, in a process of its own: this one may have loaded the kernels for the interpreter."""
    if disassembler() is None:
        pytest.skip("this Triton comes without cuobjdump, which shows machine code")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", program]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def of_kernel(codes: list[Code], name: str) -> list[Code]:
    found = [code for code in codes if code.kernel == name]
    assert found
    return found


def test_a_kernel_waits_once_and_writes_nothing_before(codes: list[Code]) -> None:
    for code in codes:
        assert (code.waits, code.stores, code.spills) == (1, 0, 0), code
        assert code.trigger == (code.values["LAUNCH"] == 2), code


def test_weights_come_first(codes: list[Code]) -> None:
    """All of a program's weights and factors of the norm, and nothing else: of rows and residual all is loaded behind."""
    for code in of_kernel(codes, "gemv_kernel"):
        size = {name: int(value) for name, value in code.values.items()}
        columns = -(-size["INPUTS"] // size["CHUNK"]) * size["CHUNK"]
        assert size["HELD"] * size["CHUNK"] == columns
        weights = size["TILE"] * columns * 2 * (1 + size["GATE"])
        assert code.before == weights + 4 * columns * size["NORM"], code
        assert code.behind == size["ROWS"] * columns * 2 * (1 + size["ADD"]), code


def test_weights_of_both_products_of_an_mlp_come_first(codes: list[Code]) -> None:
    for code in of_kernel(codes, "_mlp_kernel"):
        size = code.values
        of_gates = 2 * size["TILE"] * size["HIDDEN"] * 2 + 4 * size["HIDDEN"]
        assert code.before == of_gates + size["HELD"] * size["DOWN_TILE"] * size["SIZE"] * 2, code
        assert (code.prefetches > 0) == (not size["HELD"])


def test_packed_weights_come_first_and_no_integer_is_converted(codes: list[Code]) -> None:
    """Before the wait a scale of an output for each thread, too; behind it x + residual, and once more to store it."""
    for code in of_kernel(codes, "_packed_gemv_kernel"):
        size = {name: int(value) for name, value in code.values.items()}
        weights = size["TILE"] * size["INPUTS"] * size["BITS"] // 8
        assert code.before == weights + 4 * size["INPUTS"] + 4 * 128, code
        assert 0 < code.behind <= 3 * 2 * 2 * size["INPUTS"], code
        assert code.conversions == 0


def test_weights_of_swapped_products_come_into_the_cache_first(codes: list[Code]) -> None:
    for code in of_kernel(codes, "_swap_ab_kernel"):
        assert code.prefetches > 0
        assert code.before == 0, "they have no bias"
        assert code.behind > 0


def test_factors_of_a_norm_come_first(codes: list[Code]) -> None:
    for code in of_kernel(codes, "_rms_norm_kernel"):
        assert (code.before, code.behind) == (4 * code.values["SIZE"], 2 * 2 * code.values["SIZE"])


def test_pairs_of_numbers_come_as_matrices_and_are_not_converted(codes: list[Code]) -> None:
    """One by one they come as bytes, and each is. A few divisions of indices convert, too."""
    for code in of_kernel(codes, "_decode_kernel"):
        if code.values["PAIRS"]:
            assert code.conversions < 8, code
            assert code.matrix_loads >= 12, code
        else:
            assert code.conversions >= 64, code


@pytest.mark.skipif(triton.__version__ >= "3.7", reason="Triton specializes no warps here from 3.7 on")
def test_warps_are_specialized() -> None:
    """Four copy, and have few registers; eight multiply, and have more of them."""
    for code in printed("tests.kernels.specialized_code"):
        assert code["threads"] == 12 * 32, code
        assert min(code["USETMAXREG"], code["UTMALDG"], code["HGMMA"]) > 1, code
        assert code["STL"] == code["LDL"] == 0, code
