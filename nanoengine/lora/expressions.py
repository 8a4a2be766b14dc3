"""The expressions in an adapter's config, matched by Python as PEFT does it, but in a process of its own: some never end.

`python -I -S expressions.py SECONDS` is that process. It reads JSON and answers with JSON. It imports nothing of this package.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Sequence

MAX_SECONDS = 2
"""Of a CPU, for all expressions of an adapter: those of the largest that PEFT writes, one for each layer, take a tenth of it."""

MAX_WAIT = 60.0
"""Seconds until the answer must be there, on however busy a machine."""

MAX_BYTES = 1 << 30


def first_matches(expressions: Sequence[Sequence[str]], names: Sequence[str]) -> list[list[int | None]]:
    """For each list of expressions: which of them is the first that matches, for each name. A whole name must match.

    Raises:
        ValueError: one is no expression, or all together take too long.
    """
    if not any(expressions):
        return [[None] * len(names) for _ in expressions]
    command, asked = [sys.executable, "-I", "-S", __file__, str(MAX_SECONDS)], json.dumps([expressions, names])
    try:
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=MAX_WAIT, check=False)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"expressions that are not matched after {MAX_WAIT:g} s") from error
    if done.returncode:
        raise ValueError(f"expressions that take more than {MAX_SECONDS} s or {MAX_BYTES >> 30} GiB to match")
    found = json.loads(done.stdout)
    if isinstance(found, str):
        raise ValueError(found)
    return list(found)


# ---- in the process


def answer(expressions: Sequence[Sequence[str]], names: Sequence[str]) -> object:
    """What `first_matches` returns, or why not."""
    try:
        compiled = [[re.compile(own) for own in several] for several in expressions]
    except (re.error, RecursionError, OverflowError) as error:
        return f"what is no expression: {error}"
    return [
        [next((number for number, own in enumerate(several) if own.fullmatch(name)), None) for name in names]
        for several in compiled
    ]


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]), int(sys.argv[1])))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    print(json.dumps(answer(*json.load(sys.stdin))))
