"""Bytes that Triton kernels load and store, counted in the interpreter: every request of every program, cached or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from triton.runtime.interpreter import InterpreterBuilder


@dataclass
class Traffic:
    loaded: int = 0
    stored: int = 0

    @property
    def total(self) -> int:
        return self.loaded + self.stored


@contextmanager
def counting() -> Iterator[Traffic]:
    """What kernels move from here on; masked places are not moved."""
    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def num_bytes(places: Any, mask: Any) -> int:
        return int(mask.data.sum()) * (places.get_element_ty().primitive_bitwidth // 8)

    def watched_load(builder: Any, places: Any, mask: Any, *rest: Any) -> Any:
        traffic.loaded += num_bytes(places, mask)
        return load(builder, places, mask, *rest)

    def watched_store(builder: Any, places: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.stored += num_bytes(places, mask)
        return store(builder, places, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", watched_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", watched_store)
        yield traffic
