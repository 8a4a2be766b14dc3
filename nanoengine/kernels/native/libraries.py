"""The library of the native kernels: compiled for the CPU that is wanted, or where that cannot be, one of the wheel's."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
from functools import cache
from pathlib import Path
from typing import NamedTuple

from nanoengine.caches import cache_folder
from nanoengine.errors import InvalidConfig, shown
from nanoengine.kernels.native.compiler import (
    LIBRARY,
    NATIVE,
    PREBUILT,
    PREBUILT_TARGETS,
    SOURCES,
    CannotCompile,
    cached_library,
    compile_library,
    find_compiler,
    flags_for,
    is_safe,
)
from nanoengine.kernels.native.target import VARIABLE, check_target, missing_features, wanted_target


class Library(NamedTuple):
    """Loaded kernels."""

    functions: ctypes.CDLL
    description: str  # where they come from, as the start-up line says it
    fingerprint: str  # of the machine code: other code may round otherwise


@cache
def load_library() -> Library:
    """Load the kernels, compiled if need be.

    Raises:
        CannotCompile: and why; nor are there prebuilt ones that this CPU runs.
        InvalidConfig: $NANOENGINE_CPU names no CPU that is known here, or one whose kernels this CPU could not run; or there are
            none for it.
    """
    target = wanted_target()
    check_target(target)
    try:
        return _compiled(target)
    except CannotCompile as error:
        prebuilt = best_prebuilt(target)
        if prebuilt is not None:
            return _prebuilt(prebuilt, str(error))
        if target != NATIVE:
            raise InvalidConfig(
                f"{VARIABLE} is {shown(target)}, for which there are no prebuilt kernels, and none can be compiled: {error}; "
                f"install a compiler, or unset {VARIABLE}"
            ) from error
        raise


def must_compile() -> bool:
    """Whether `load_library` would compile now, which takes seconds: there is a compiler, and no library is cached."""
    try:
        compiler = find_compiler()
    except CannotCompile:
        return False
    return not is_safe(cached_library(SOURCES, compiler, flags_for(wanted_target()), cache_folder("kernels")))


def best_prebuilt(wanted: str) -> str | None:
    """The best target that the wheel brought kernels for and this CPU runs, or the wanted one if it is such; None if none is."""
    targets = PREBUILT_TARGETS.get(platform.machine(), {})
    usable = (name for name, flags in targets.items() if (PREBUILT / name).is_dir() and not missing_features(flags))
    return next((name for name in usable if wanted in (NATIVE, name)), None)


def _compiled(target: str) -> Library:
    path = _made(target, find_compiler())
    if isinstance(path, CannotCompile):
        raise path.with_traceback(None)
    try:
        return _load(path, f"compiled for {'this CPU' if target == NATIVE else target}")
    finally:
        if not path.is_relative_to(
            cache_folder("kernels")
        ):  # it could not be cached; once loaded, its file is not needed
            shutil.rmtree(path.parent, ignore_errors=True)


@cache
def _made(target: str, compiler: str) -> Path | CannotCompile:
    """The library that a compiler makes for a target, or its error: it runs once."""
    try:
        return compile_library(SOURCES, compiler, flags_for(target), cache_folder("kernels"))
    except CannotCompile as error:
        return error


def _prebuilt(target: str, reason: str) -> Library:
    try:
        return _load(PREBUILT / target / LIBRARY, f"prebuilt for {target}: {reason}")
    except CannotCompile as error:
        raise CannotCompile(f"{reason}, and {error}") from error


def _load(path: Path, description: str) -> Library:
    try:
        code = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        return Library(ctypes.CDLL(str(path)), description, code)
    except OSError as error:
        raise CannotCompile(f"the library cannot be loaded: {error}") from error
