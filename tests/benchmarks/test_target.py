"""Measuring as on another CPU."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks.machine import machine_facts
from benchmarks.target import hold_to_cpu

VARIABLES = ("NANOENGINE_CPU", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """That of a process which has not imported torch."""
    plain = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    monkeypatch.setattr(os, "environ", plain)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return plain


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("x86-64-v3", ["x86-64-v3", "avx2", "AVX2", "AVX2"]),
        ("x86-64-v4", ["x86-64-v4", "avx512", "AVX512_CORE", "AVX512"]),
        ("native", ["native", None, None, None]),
    ],
)
def test_kernels_and_libraries_are_held_to_it(environment: dict[str, str], name: str, values: list[str | None]) -> None:
    hold_to_cpu(["--model", "demo", "--cpu", name, "--repeat", "2"])
    assert [environment.get(variable) for variable in VARIABLES] == values
    assert machine_facts()["cpu_target"] == name
