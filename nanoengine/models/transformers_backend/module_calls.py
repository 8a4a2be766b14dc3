"""The calls of modules in a forward pass: what goes into each, what comes out of it, and which calls are inside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


class Call:
    """One call of a module."""

    output: Any = None

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]):
        self.module: Any = module
        self.given = [*args, *kwargs.values()]
        self.inner: list[Call] = []  # in their order, those inside of others too

    def of(self, kind: type[nn.Module]) -> list[Call]:
        """The calls of modules of a class inside it."""
        return [call for call in self.inner if isinstance(call.module, kind)]


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Call]]:
    """The list of all calls that are made meanwhile, in the order in which they begin."""
    calls: list[Call] = []
    unfinished: list[Call] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        call = Call(module, args, kwargs)
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
