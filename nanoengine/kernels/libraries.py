"""The libraries of the native kernels: compiled for the CPU that is wanted, or where that cannot be, those of the wheel."""

from __future__ import annotations

import ctypes
import platform
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from nanoengine.errors import InvalidConfig, shown
from nanoengine.kernels.compiler import (
    NATIVE,
    PREBUILT,
    PREBUILT_TARGETS,
    SOURCES,
    CannotCompile,
    cache_folder,
    compile_all,
    find_compiler,
    flags_for,
    kept_libraries,
)
from nanoengine.kernels.target import VARIABLE, check_target, missing_features, wanted_target

MAPPED_FILES = Path("/proc/self/maps")
OPENMP = re.compile(r"/lib(gomp|iomp5|omp)(-[0-9a-f]+)?\.so[.\d]*$")


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
        CannotCompile: and why; nor are there prebuilt ones that this CPU runs.
        InvalidConfig: there are none for the CPU that $NANOENGINE_CPU names, or this CPU could not run them.
    """
    target = wanted_target()
    try:
        return _compiled(target)
    except CannotCompile as error:
        prebuilt = best_prebuilt(target)
        if prebuilt is not None:
            return _prebuilt(prebuilt, str(error))
        if target != NATIVE:
            raise InvalidConfig(
                f"{VARIABLE} is {shown(target)}, for which there are no prebuilt kernels that this CPU runs, and none can be "
                f"compiled: {error}; install a compiler, or unset {VARIABLE}"
            ) from error
        raise


def must_compile() -> bool:
    """Whether `load_libraries` would compile now, which takes seconds: there is a compiler, and nothing is kept."""
    try:
        compiler = find_compiler()
    except CannotCompile:
        return False
    kept = kept_libraries(SOURCES, compiler, flags_for(wanted_target()), cache_folder())
    return not all(path.is_file() for path in kept.values())


def best_prebuilt(wanted: str) -> str | None:
    """The best target that the wheel brought kernels for and this CPU runs, or the wanted one if it is such; None if none is."""
    targets = PREBUILT_TARGETS.get(platform.machine(), {})
    found = (name for name, flags in targets.items() if (PREBUILT / name).is_dir() and not missing_features(flags))
    return next((name for name in found if wanted in (NATIVE, name)), None)


def _compiled(target: str) -> Libraries:
    compiler = find_compiler()
    check_target(target, compiler)
    paths = compile_all(SOURCES, compiler, flags_for(target), cache_folder())
    return Libraries(_load(paths), f"compiled for {'this CPU' if target == NATIVE else target}")


def _prebuilt(target: str, reason: str) -> Libraries:
    try:
        _show_openmp()
        libraries = _load({source.stem: PREBUILT / target / f"{source.stem}.so" for source in SOURCES.glob("*.cpp")})
    except CannotCompile as error:
        raise CannotCompile(f"{reason}, and {error}") from error
    return Libraries(libraries, f"prebuilt for {target}: {reason}")


def _load(paths: dict[str, Path], mode: int = ctypes.DEFAULT_MODE) -> dict[str, ctypes.CDLL]:
    try:
        return {name: ctypes.CDLL(str(path), mode) for name, path in paths.items()}
    except OSError as error:
        raise CannotCompile(f"a library cannot be loaded: {error}") from error


def _show_openmp() -> None:
    """Let libraries that name no OpenMP find the one that torch has loaded, under whatever name it came with torch."""
    paths = dict.fromkeys(line.split(maxsplit=5)[-1] for line in MAPPED_FILES.read_text().splitlines())
    _load({path: Path(path) for path in paths if OPENMP.search(path)}, ctypes.RTLD_GLOBAL)
