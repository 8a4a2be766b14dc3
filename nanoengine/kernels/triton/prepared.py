"""Launches that can be made again.

Before every launch, Triton looks for the compiled kernel by the types of all arguments: on the host that takes ten times as long
as the launch. At the same addresses, and with the same numbers, it is the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

KNOWN = ("3.6.", "3.9.")
"""Versions of Triton whose compiled kernels have this signature."""

Again = Callable[[], object]


class Launch(Protocol):
    """Launches a kernel.

    Args:
        kernel: of `triton.jit`.
        grid: numbers of programs.
        args: first arguments of the kernel, in its order.
        options: its other arguments by name, in its order, and options of the launch such as num_warps.
    """

    def __call__(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any: ...


def launch_once(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A `Launch` that nobody will repeat."""
    return kernel[grid](*args, **options)


class Launches:
    """A `Launch` that records launches in their order, and holds all tensors that are arguments of kernels.

    Args:
        stream: on which kernels are launched, as CUDA's number.
        apart_from: tensors that are not held: the caller repeats the launches while these are at the same addresses.

    Attributes:
        again: repeat the launches, by address; None where Triton is of another version than `KNOWN`.
    """

    def __init__(self, stream: int, apart_from: Iterable[Tensor]):
        self._stream, self._others = stream, set(map(id, apart_from))
        self.again: list[Again] | None = []
        self.memory: list[Tensor] = []

    def __call__(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        compiled = launch_once(kernel, grid, args, options)
        self.memory += [value for value in args if isinstance(value, Tensor) and id(value) not in self._others]
        if not is_known():
            self.again = None
        elif self.again is not None:
            self.again.append(self._again(compiled, kernel, grid, args, options))

    def _again(
        self, compiled: Any, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Again:
        """What the last line of `JITFunction.run` does, without hooks."""
        if compiled is None:  # the interpreter compiles nothing
            return partial(launch_once, kernel, grid, args, options)
        named = [options[name] for name in kernel.arg_names[len(args) :]]
        values = [value.data_ptr() if isinstance(value, Tensor) else value for value in (*args, *named)]
        about = self._stream, compiled.function, compiled.packed_metadata
        return partial(compiled.run, *(*grid, 1, 1)[:3], *about, None, None, None, *values)


def is_known() -> bool:
    """Whether kernels of this Triton can be launched again."""
    return triton.knobs.runtime.interpret or triton.__version__.startswith(KNOWN)


def current_stream(device: torch.device) -> int:
    """The stream on which Triton launches kernels for a device."""
    return torch._C._cuda_getCurrentRawStream(device.index or 0) if device.type == "cuda" else 0
