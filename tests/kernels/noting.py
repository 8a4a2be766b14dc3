"""Launches of Triton kernels, noted instead of done: what they would be compiled for, as Triton tells it apart."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

import nanoengine.kernels.triton as package

BACKEND = CUDABackend(GPUTarget("cuda", 90, 32))


@dataclass(frozen=True)
class Launch:
    """As `triton.compile` wants it.

    Attributes:
        signature: type of each argument by name.
        constants, attributes: by places of arguments; the values of those that are compiled in, and what is known of others.
        options: num_warps and what else is no argument.
        values: of all arguments by name.
    """

    kernel: JITFunction[Any]
    grid: tuple[int, ...]
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    values: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def key(self) -> str:
        """The same for launches of one compiled kernel."""
        return f"{self.name} {self.signature} {self.constants} {self.attributes} {self.options}"

    @property
    def least_capability(self) -> int:
        """Compute capability times ten that it needs."""
        types = str(self.signature)
        is_new = "*fp8e4nv" in types or "tensordesc" in types
        return 90 if is_new or self.options.get("launch_pdl") else 80


class Noted:
    """In place of a kernel."""

    def __init__(self, kernel: Any, launches: list[Launch]):
        if not isinstance(kernel, JITFunction):  # it is the interpreter's
            options = {name: value for name, value in kernel.kwargs.items() if name.startswith("do_not_specialize")}
            kernel = JITFunction(kernel.fn, **options)
        self.kernel, self.launches = kernel, launches
        self._bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **given: Any) -> None:
            values, specialization, options = self._bind(*args, **given)
            _, *described = self.kernel._pack_args(BACKEND, given, values, specialization, options)
            self.launches.append(Launch(self.kernel, grid, *described, options, values))

        return launch


def kernels(module: ModuleType) -> dict[str, Any]:
    """Those of a module by name."""
    return {name: kernel for name, kernel in vars(module).items() if name.endswith("_kernel")}


def modules() -> list[ModuleType]:
    """Where our kernels are."""
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return [importlib.import_module(name) for name in names]


@contextmanager
def noting() -> Iterator[list[Launch]]:
    """No kernel of ours is launched from here on: instead there is a list of them."""
    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in modules():
            for name, kernel in kernels(module).items():
                patch.setattr(module, name, Noted(kernel, launches))
        yield launches
