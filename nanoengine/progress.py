"""Progress of start-up: a line for each stage while it runs on a terminal; in a log, at most one line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

logger = logging.getLogger("nanoengine")


def is_notebook() -> bool:
    """Whether standard error is shown on the page of a notebook, below the cell that runs."""
    return type(sys.stderr).__module__.startswith("ipykernel.")


def has_reader() -> bool:
    """Whether bars can be drawn on standard error. Services and pythonw may have none, or a closed one."""
    try:
        return is_notebook() or sys.stderr.isatty()
    except (AttributeError, ValueError):  # it is None, or closed
        return False


def new_bar(*, shown: bool, **options: Any) -> tqdm[Any]:
    """A bar of tqdm, which draws nothing without a terminal; in a notebook a widget, if it has widgets."""
    kind: Any = tqdm
    if is_notebook():
        from tqdm.auto import tqdm as kind  # type: ignore[no-redef]  # it imports asyncio, too, which takes 30 ms
    bar: tqdm[Any] = kind(disable=not (shown and has_reader()), **options)
    return bar


@contextmanager
def stage(name: str, total: int | None = None, unit: str = "it", *, shown: bool) -> Iterator[Callable[[], object]]:
    """Show a stage while it runs; the result is a function that counts one of `total` parts as done.

    Args:
        name: of the stage.
        total: number of its parts; None shows the name alone.
        unit: name of a part.
        shown: False prints nothing.
    """
    if shown and total is None and not has_reader():
        logger.info("%s ...", name)
    layout = f"{name} ..." if total is None else None
    with new_bar(shown=shown, total=total, desc=name, unit=unit, bar_format=layout, leave=False) as bar:
        yield bar.update
