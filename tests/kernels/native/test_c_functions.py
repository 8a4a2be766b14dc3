"""C functions as the sources declare them. What they compute is tested where they are used."""

from __future__ import annotations

import ctypes

from nanoengine.kernels.native.c_functions import c_functions, signatures
from nanoengine.kernels.native.compiler import SOURCES
from tests.kernels.marks import needs_kernels


def test_types_are_those_of_the_sources() -> None:
    floats, sizes = [ctypes.c_void_p] * 2, [ctypes.c_size_t] * 2
    assert signatures()["log_sum_exp"] == (None, floats + sizes)
    assert signatures()["panels_size"] == (ctypes.c_size_t, [ctypes.c_int64, *sizes])
    assert signatures()["quantized_instruction"] == (ctypes.c_char_p, [])
    assert signatures()["rms_norm"][1][-1] is ctypes.c_float


def test_every_source_with_an_interface_has_some() -> None:
    """Functions stand behind the one `extern "C"` of a source, at its end."""
    interfaces = [path.read_text().partition('extern "C"')[2] for path in SOURCES.glob("*.cpp")]
    assert all('extern "C"' not in interface and "namespace" not in interface for interface in interfaces)
    assert all(any(f" {name}(" in interface for name in signatures()) for interface in interfaces)


@needs_kernels
def test_every_c_function_is_loaded() -> None:
    assert vars(c_functions()).keys() == signatures().keys()
