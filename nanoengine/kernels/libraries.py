"""The libraries of the native kernels, for the CPU that is wanted."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

from nanoengine.kernels.compiler import (
    NATIVE,
    SOURCES,
    CannotCompile,
    cache_folder,
    compile_all,
    find_compiler,
    flags_for,
)
from nanoengine.kernels.target import check_target, wanted_target


class Libraries(NamedTuple):
    """Loaded kernels."""

    by_source: dict[str, ctypes.CDLL]
    """Name of each kernel's source -> its library."""

    description: str
    """Where they come from, as the start-up line says it."""


@cache
def load_libraries() -> Libraries:
    """Load the libraries of all kernels, compiled if need be.

    torch must be imported before: the libraries then share its OpenMP, and with it its threads.

    Raises:
        CannotCompile: and why.
        InvalidConfig: $NANOENGINE_CPU names what the compiler does not know, or what this CPU is not.
    """
    target = wanted_target()
    compiler = find_compiler()
    check_target(target, compiler)
    paths = compile_all(SOURCES, compiler, flags_for(target), cache_folder())
    return Libraries(_load(paths), f"compiled for {'this CPU' if target == NATIVE else target}")


def _load(paths: dict[str, Path]) -> dict[str, ctypes.CDLL]:
    try:
        return {name: ctypes.CDLL(str(path)) for name, path in paths.items()}
    except OSError as error:
        raise CannotCompile(f"a compiled kernel cannot be loaded: {error}") from error
