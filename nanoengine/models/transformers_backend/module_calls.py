"""The calls of modules in a forward pass: inputs, output, and inner calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


class ModuleCall:
    """One call of a module."""

    output: Any = None

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]):
        self.module: Any = module
        self.inputs = [*args, *kwargs.values()]
        self.inner: list[ModuleCall] = []  # in order, nested ones included

    def of(self, kind: type[nn.Module]) -> list[ModuleCall]:
        """The inner calls of modules of a class."""
        return [call for call in self.inner if isinstance(call.module, kind)]


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[ModuleCall]]:
    """Record all calls of modules, in the order in which they start."""
    calls: list[ModuleCall] = []
    unfinished: list[ModuleCall] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        call = ModuleCall(module, args, kwargs)
        for outer in unfinished:
            outer.inner.append(call)
        calls.append(call)
        unfinished.append(call)

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        while unfinished[-1].module is not module:  # calls that an exception left
            unfinished.pop()
        unfinished.pop().output = output

    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in model.modules()]
    hooks += [module.register_forward_hook(leave) for module in model.modules()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
