"""The C functions of the native kernels, as their sources declare them."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from threading import Lock, get_ident
from types import SimpleNamespace
from typing import Any

import torch

from nanoengine.kernels.native.compiler import SOURCES
from nanoengine.kernels.native.libraries import load_library

TYPES = {
    "void": None,
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "const char*": ctypes.c_char_p,
}
"""Types of results and arguments; all other pointers are addresses."""

FUNCTION = re.compile(r"^ ?((?:const )?\w+\*?) (\w+)\(([^)]*)\) \{", re.MULTILINE)
"""Result, name and arguments of a function, behind `extern "C"`."""

_RECORDING = Lock()


@cache
def signatures() -> dict[str, tuple[Any, list[Any]]]:
    """Name of each C function -> the type of its result, and those of its arguments."""
    table: dict[str, tuple[Any, list[Any]]] = {}
    for path in SOURCES.glob("*.cpp"):
        interface = path.read_text(encoding="utf-8").partition('extern "C"')[2]
        for result, name, arguments in FUNCTION.findall(interface):
            table[name] = TYPES[result], [_type_of(one) for one in arguments.split(",") if one]
    return table


def functions_of(library: Path | ctypes.CDLL) -> SimpleNamespace:
    """The functions of a compiled library, with their types set; a library of some of the sources has some of them.

    Torch's profiler sees each call as `nanoengine::name`.
    """
    loaded = ctypes.CDLL(str(library)) if isinstance(library, Path) else library
    functions = SimpleNamespace()
    for name, (result, arguments) in signatures().items():
        if hasattr(loaded, name):
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
            setattr(functions, name, _seen_by_profilers(function))
    return functions


@cache
def c_functions() -> SimpleNamespace:
    """Those of the library for this CPU.

    Raises:
        CannotCompile: there is no compiler, or it failed.
    """
    return functions_of(load_library().functions)


@contextmanager
def recorded_calls(report: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Report every call that this thread makes meanwhile: the function's name, and its arguments.

    One thread at a time; another waits.
    """
    functions, thread = c_functions(), get_ident()

    def reporting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if get_ident() == thread:
                report(name, arguments)
            return function(*arguments)

        return call

    with _RECORDING:
        originals = dict(vars(functions))
        vars(functions).update({name: reporting(name, function) for name, function in originals.items()})
        try:
            yield
        finally:
            vars(functions).update(originals)


def words_of(name: str, arguments: Sequence[Any]) -> list[int]:
    """A call as `run_calls` makes it again while its tensors live (calls.h).

    Raises:
        LookupError: it is not one of those that can be made again.
    """
    again = getattr(load_library().functions, f"{name}_again", None)
    if again is None:
        raise LookupError(name)
    types = signatures()[name][1]
    words = [_word(kind, argument) for kind, argument in zip(types, arguments, strict=True)]
    return [len(words), _word(ctypes.c_void_p, ctypes.cast(again, ctypes.c_void_p).value), *words]


def _word(kind: Any, argument: Any) -> int:
    value = kind(argument)
    return int.from_bytes(bytes(value).ljust(8, b"\0"), sys.byteorder)


def _type_of(argument: str) -> Any:
    return ctypes.c_void_p if "*" in argument else TYPES[argument.split()[0]]


def _seen_by_profilers(function: Callable[..., Any]) -> Callable[..., Any]:
    is_profiled = torch.autograd._profiler_enabled

    @wraps(function)
    def call(*arguments: Any) -> Any:
        if not is_profiled():
            return function(*arguments)
        with torch.profiler.record_function(f"nanoengine::{function.__name__}"):
            return function(*arguments)

    return call
