"""Panics of the library `tokenizers` as errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def raising(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call the library: a panic of Rust, which files and texts can cause, is no Exception, and would end a thread."""
    try:
        return function(*args, **kwargs)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"the library tokenizers panics: {error}") from error
