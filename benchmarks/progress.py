"""What is being measured, while it is: a bar on a terminal, a line anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def bar(desc: str, items: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """A bar of tqdm, which is gone when it ends."""
    own = tqdm(items, desc=desc, leave=False, disable=None, **options)
    if own.disable:
        print(f"{desc} ...", file=sys.stderr, flush=True)
    return own
