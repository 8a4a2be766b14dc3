"""The C functions of the native kernels, with the types of their arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from threading import Lock, get_ident
from types import SimpleNamespace
from typing import Any

from nanoengine.kernels.libraries import load_library

POINTER, SIZE, INT, FLOAT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_float
INT64 = ctypes.c_int64

ATTENTION_SPEC = [FLOAT, FLOAT, SIZE, POINTER]
"""scale, soft_cap, window (0: none) and sinks, as attention_spec.h has them."""

SIGNATURES: dict[str, list[type]] = {
    "packed_size": [INT, SIZE, SIZE],
    "pack": [INT, POINTER, POINTER, SIZE, SIZE, SIZE],
    "linear": [INT, INT, *[POINTER] * 3, FLOAT, *[POINTER] * 3, *[SIZE] * 3],
    "gated_linear": [INT, INT, *[POINTER] * 3, FLOAT, *[POINTER] * 2, *[SIZE] * 3],
    "experts": [INT, INT, *[POINTER] * 10, *[SIZE] * 5],
    "gate": [INT, INT, POINTER, POINTER, SIZE, SIZE],
    "embed": [INT, POINTER, POINTER, POINTER, SIZE, SIZE],
    "quantized_size": [INT64, SIZE, SIZE],
    "quantized_pack_blocks": [INT, POINTER, POINTER, SIZE, SIZE],
    "quantized_pack_groups": [INT64, *[POINTER] * 4, SIZE, SIZE],
    "quantized_linear": [INT, INT, INT, *[POINTER] * 3, FLOAT, POINTER, SIZE, POINTER, POINTER, *[SIZE] * 3],
    "quantized_gated_linear": [INT, INT, INT, *[POINTER] * 3, FLOAT, POINTER, SIZE, POINTER, *[SIZE] * 3],
    "quantized_instruction": [],
    "quantized_embed": [INT, POINTER, POINTER, SIZE, POINTER, SIZE, SIZE],
    "quantized_experts": [INT, INT, INT, *[POINTER] * 10, *[SIZE] * 5],
    "dequantize": [INT, INT, POINTER, POINTER, SIZE],
    "rms_norm": [INT, POINTER, POINTER, POINTER, POINTER, SIZE, SIZE, FLOAT],
    "draw_tokens": [*[POINTER] * 4, SIZE, SIZE],
    "set_num_threads": [SIZE],
    "log_sum_exp": [POINTER, POINTER, SIZE, SIZE],
    "attention_write": [
        INT,
        INT,
        *[POINTER, SIZE] * 3,
        POINTER,
        POINTER,
        FLOAT,
        POINTER,
        POINTER,
        SIZE,
        *[POINTER] * 4,
        *[SIZE] * 6,
    ],
    "attention_decode": [INT, INT, *[POINTER] * 4, SIZE, POINTER, POINTER, SIZE, POINTER, *[SIZE] * 6, *ATTENTION_SPEC],
    "attention_prefill": [INT, INT, *[POINTER] * 4, SIZE, *[POINTER] * 3, *[SIZE] * 6, *ATTENTION_SPEC],
}
"""Name of each C function -> the types of its arguments."""


RESULTS = {"packed_size": SIZE, "quantized_size": SIZE, "quantized_instruction": ctypes.c_char_p}
"""The types of their results, where they have any."""


@cache
def c_functions() -> SimpleNamespace:
    """The functions of the compiled library, with their argument types set.

    Raises:
        CannotCompile: there is no compiler, or it failed.
    """
    library = load_library().functions
    functions = SimpleNamespace()
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = RESULTS.get(name)
        setattr(functions, name, function)
    return functions


@contextmanager
def recorded_calls(report: Callable[[Callable[[], object]], None]) -> Iterator[None]:
    """Report every call that this thread makes meanwhile, as one that can be made again while its tensors live.

    One thread at a time; another waits.
    """
    with _recording():
        yield from _reported_calls(report)


@cache
def _recording() -> Lock:
    return Lock()


def _reported_calls(report: Callable[[Callable[[], object]], None]) -> Iterator[None]:
    functions, thread = c_functions(), get_ident()
    originals = dict(vars(functions))

    def reporting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if get_ident() == thread:
                report(partial(function, *arguments))
            return function(*arguments)

        return call

    vars(functions).update({name: reporting(function) for name, function in originals.items()})
    try:
        yield
    finally:
        vars(functions).update(originals)
