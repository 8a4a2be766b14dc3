"""Triton kernels compile for A100, H100 and B200, and fit them, as far as one launch of each shows; no GPU is needed.

`python -m tests.kernels.ahead_of_time` compiles every launch for all three: run it after a change to a kernel.
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

from tests.kernels.ahead_of_time import VARIANTS, Compiled
from tests.kernels.noting import kernels, modules

ROOT = Path(__file__).parents[2]


def test_launches_of_all_kernels_compile_and_fit_their_chips() -> None:
    """In a process of its own: this one may have loaded the kernels for the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.ahead_of_time", "--some"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    compiled = [Compiled(**json.loads(line)) for line in result.stdout.splitlines()]
    faults = [
        f"{launch.launch} on sm_{launch.architecture}{', aligned' * launch.aligned}: {fault}"
        for launch in compiled
        for fault in launch.faults()
    ]
    assert not faults, "\n".join(faults)
    assert result.returncode == 0, result.stderr[-3000:]
    assert {launch.kernel for launch in compiled} == {name for module in modules() for name in kernels(module)}
    assert {(launch.architecture, launch.aligned) for launch in compiled} == set(VARIANTS)


@pytest.mark.parametrize(
    ("taken", "fault"),
    [
        ({"registers": 256}, "256 registers, and the chip has 255"),
        ({"tensor_memory": 513}, "513 columns of tensor memory"),
        ({"shared": (227 << 10) + 1}, "bytes of shared memory"),
        ({"spilled": 4}, "4 bytes of registers are spilled"),
        ({"error": "wrong_name is not defined"}, "wrong_name is not defined"),
    ],
    ids=str,
)
def test_more_than_there_is_is_a_fault(taken: dict[str, Any], fault: str) -> None:
    fits: dict[str, Any] = {"registers": 255, "shared": 227 << 10, "tensor_memory": 512}
    assert not Compiled("kernel", "launch", 100, True, **fits).faults()
    [found] = Compiled("kernel", "launch", 100, True, **fits | taken).faults()
    assert fault in found
