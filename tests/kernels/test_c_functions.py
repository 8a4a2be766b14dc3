"""Types of C functions: those of the sources, and set on what is loaded. What they compute is tested where they are used."""

from __future__ import annotations

import re

import pytest
import torch

from nanoengine.kernels.c_functions import FLOAT, INT, INT64, POINTER, SIGNATURES, SIZE, c_functions
from nanoengine.kernels.compiler import SOURCES
from nanoengine.kernels.native_operations import unsupported_reason

REASON = unsupported_reason(torch.device("cpu"), torch.float32)
needs_kernels = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")


@needs_kernels
def test_every_c_function_is_loaded_with_its_types() -> None:
    functions = c_functions()
    for name, arguments in SIGNATURES.items():
        assert getattr(functions, name).argtypes == arguments


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_the_sources(name: str) -> None:
    interfaces = [path.read_text().partition('extern "C"')[2] for path in SOURCES.glob("*.cpp")]
    declaration = re.compile(rf"^ ?(?:[\w*\"]+ )+{name}\(([^)]*)\)", re.MULTILINE)
    (declared,) = (found for interface in interfaces for found in declaration.findall(interface))
    types = {"size_t": SIZE, "int": INT, "int64_t": INT64, "float": FLOAT}
    found = [
        POINTER if "*" in argument else types[argument.split()[0]] for argument in filter(None, declared.split(","))
    ]
    assert found == SIGNATURES[name]
