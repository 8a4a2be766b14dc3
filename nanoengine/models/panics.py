"""Panics of the library `tokenizers` as errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def raising(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function of the library, and raise its panics as ValueError: a panic of Rust is not an Exception."""
    try:
        return function(*args, **kwargs)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"the library tokenizers panics: {error}") from error
