"""CpuRecorder: what a CUDA graph is on a GPU. The calls that a step makes are made again, without the Python around them.

A decode step of a small model makes hundreds of short calls, and finding out what to call takes as long as a third of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nanoengine.kernels.native.c_functions import c_functions, recorded_calls, words_of
from nanoengine.kernels.recording.step_memory import StepMemory

MAKES_MEMORY = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})
"""Functions of torch that need not be called again: what they made is still there."""

TELLS_SHAPE = frozenset(
    {
        "__get__",
        "__len__",
        "data_ptr",
        "dim",
        "element_size",
        "is_contiguous",
        "is_floating_point",
        "numel",
        "size",
        "storage_offset",
        "stride",
    }
)
"""Those whose answer is the same every time; of all others that answer with no tensor, that is not known."""

SHAPED_BY_NUMBERS = frozenset({"argwhere", "bincount", "masked_select", "nonzero", "unique", "unique_consecutive"})
"""Those whose result is of another size for other numbers."""

IN_PLACE = frozenset(f"__{name}__" for name in ("setitem", "iadd", "isub", "imul", "itruediv", "iand", "ior"))
"""Operators that change their arguments; methods that do are named with a `_` at the end."""


class CannotRecord(Exception):
    """Some work reads numbers from a tensor, and what depends on them would not be done anew."""


class CpuRecorder:
    """Records C functions of the native kernels and functions of torch, in their order."""

    records_ahead = False

    def __init__(self) -> None:
        self._memory = StepMemory()

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """As `Recorder.record`.

        Raises:
            CannotRecord: the work reads numbers from a tensor.
        """
        work()  # a cached value need not be recorded
        program = Program()
        with recorded_calls(program.add_native), _TorchCalls(program.add, self._memory):
            result = work()
        return partial(_replay, program.parts(), self._memory.view_of(result))


class Program:
    """The calls of a step: those of native kernels that follow one another are one, without Python in between."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object] | list[int]] = []

    def add(self, call: Callable[[], object]) -> None:
        self._calls.append(call)

    def add_native(self, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            words = words_of(name, arguments)
        except LookupError as error:
            raise CannotRecord(f"a step that calls {name} cannot be recorded: it is not for steps") from error
        if self._calls and isinstance(self._calls[-1], list):
            self._calls[-1] += words
        else:
            self._calls.append(words)

    def parts(self) -> list[Callable[[], object]]:
        return [_native(call) if isinstance(call, list) else call for call in self._calls]


def _native(words: list[int]) -> Callable[[], object]:
    memory = np.array(words, dtype=np.uint64)
    return partial(_run_native, c_functions().run_calls, memory.ctypes.data, memory)


def _run_native(run_calls: Callable[[int, int], object], address: int, words: np.ndarray[Any, Any]) -> None:
    run_calls(address, len(words))


def _replay(parts: list[Callable[[], object]], result: Tensor) -> Tensor:
    for call in parts:
        call()
    return result


class _TorchCalls(TorchFunctionMode):
    """Reports every call of torch that does something, as one that does it again to the same tensors."""

    def __init__(self, report: Callable[[Callable[[], object]], None], memory: StepMemory):
        super().__init__()
        self._report, self._memory = report, memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.index_select and not kwargs and (rows := _select_rows(self._memory, *args)) is not None:
            return rows
        result = func(*args, **(kwargs or {}))
        name, made = getattr(func, "__name__", str(func)), list(_tensors(result))
        is_nonzero = name in SHAPED_BY_NUMBERS or (name == "where" and len(args) == 1)
        if is_nonzero or (name == "__getitem__" and _reads_numbers(args[1])):
            raise CannotRecord(
                f"a step that calls {name} by numbers in a tensor cannot be recorded: it takes other parts"
            )
        again = partial(func, *args, **(kwargs or {}))
        if name in IN_PLACE or (name.endswith("_") and not name.endswith("__")) or "out" in (kwargs or {}):
            self._report(again)
        elif not made and name not in TELLS_SHAPE:
            raise CannotRecord(
                f"a step that calls {name} cannot be recorded: what follows from its answer would not change"
            )
        elif name in MAKES_MEMORY:
            return self._memory.take(result)
        else:
            inputs = set(map(_memory, _tensors((args, kwargs))))
            if any(_memory(tensor) not in inputs for tensor in made):  # not views of the inputs
                self._report(partial(_do_again, again, made))
        return result


def _reads_numbers(index: Any) -> bool:
    """Whether an index selects a part whose position or size is a number in a tensor."""
    for part in index if isinstance(index, tuple) else (index,):
        ends = (part.start, part.stop, part.step) if isinstance(part, slice) else ()
        is_mask_or_number = isinstance(part, Tensor) and (part.dim() == 0 or part.dtype in (torch.bool, torch.uint8))
        if is_mask_or_number or any(isinstance(end, Tensor) for end in ends):
            return True
    return False


def _select_rows(memory: StepMemory, x: Tensor, dim: int, index: Tensor) -> Tensor | None:
    """`x.index_select(dim, index)` by a native call, which stands among others; None where x does not lie as that wants it."""
    tables = x if dim == 1 else x.unsqueeze(0)
    if dim not in (0, 1) or not x.numel() or not tables[0, 0].is_contiguous() or not index.is_contiguous():
        return None
    if index.dtype not in (torch.int32, torch.int64) or not (x.is_cpu and index.is_cpu):
        return None
    out = memory.take(x.new_empty(*x.shape[:dim], len(index), *x.shape[dim + 1 :]))
    size = x.element_size()
    strides = tables.stride(0) * size, tables.stride(1) * size, tables[0, 0].nbytes
    inputs = index.data_ptr(), index.element_size(), len(index)
    c_functions().select_rows(tables.data_ptr(), len(tables), *strides, *inputs, out.data_ptr())
    return out


def _do_again(call: Callable[[], Any], targets: list[Tensor]) -> None:
    for target, value in zip(targets, _tensors(call()), strict=True):
        target.copy_(value)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
