"""What start-up is doing while its user waits: a line for each stage, gone when it is over; in a log, at most one of them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

logger = logging.getLogger("nanoengine")


def has_terminal() -> bool:
    """Whether standard error is a terminal. Services and pythonw may have no standard error, or a closed one."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # it is None, or closed
        return False


@contextmanager
def stage(name: str, total: int | None = None, unit: str = "it", *, shown: bool) -> Iterator[Callable[[], object]]:
    """Show what is being done for as long as it is; what it gives counts one of `total` as done.

    Args:
        name: of what is done.
        total: number of its parts; None shows the name alone.
        unit: what a part is called.
        shown: False prints nothing.
    """
    on_terminal = has_terminal()
    if shown and total is None and not on_terminal:
        logger.info("%s ...", name)
    layout = f"{name} ..." if total is None else None
    disable = not (shown and on_terminal)
    with tqdm(total=total, desc=name, unit=unit, bar_format=layout, leave=False, disable=disable) as bar:
        yield bar.update
