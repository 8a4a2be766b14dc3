"""Two saved runs side by side: every figure of every case that both have, and how much better the second is.

A ratio counts only if the ranges of the two do not overlap; where they do, it stands in parentheses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.figures import higher_is_better
from benchmarks.options import BadOption
from benchmarks.report import align, show_spread

FACTS = ("mode", "versions", "cpu", "cores", "device", "dtype", "threads", "backend", "arguments")
WHERE = ("save", "plot")  # arguments that change no figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, metavar="A.json", help="written by --save")
    parser.add_argument("after", type=Path, metavar="B.json")


def show(before: Path, after: Path) -> None:
    a, b = _read(before), _read(after)
    if a["mode"] != b["mode"]:
        raise BadOption(f"{before} is of the mode {a['mode']}, {after} of {b['mode']}: they have no figures in common")
    for name in FACTS:
        difference = _difference(a.get(name), b.get(name))
        if difference:
            print(f"different {name}: {difference}")
    lines = list(_lines(a, b))
    if not lines:
        raise BadOption(f"{before} and {after} have no case in common")
    print(*align([["case", "engine", "figure", "A", "B", "B is better"], *lines]), sep="\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadOption(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict) or not {"mode", "rows"} <= content.keys():
        raise BadOption(f"{path} was not written by --save of this benchmark")
    return content


def _difference(a: Any, b: Any) -> str:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [key for key in a | b if key not in WHERE and a.get(key) != b.get(key)]
        return ", ".join(f"{key} {a.get(key)} and {b.get(key)}" for key in keys)
    return f"{a} and {b}" if a != b else ""


def _lines(a: dict[str, Any], b: dict[str, Any]) -> Iterator[list[str]]:
    after = {_key(row): row["figures"] for row in b["rows"]}
    for row in a["rows"]:
        theirs = after.get(_key(row), {})
        for name, figure in row["figures"].items():
            if name in theirs:
                case = ", ".join(f"{key} {value}" for key, value in row["case"].items())
                other = theirs[name]
                yield [case, row["engine"], name, show_spread(figure), show_spread(other), _ratio(name, figure, other)]


def _key(row: dict[str, Any]) -> str:
    return json.dumps([row["case"], row["engine"]], sort_keys=True)


def _ratio(name: str, a: dict[str, float], b: dict[str, float]) -> str:
    if a["median"] <= 0 or b["median"] <= 0:
        return ""
    ratio = b["median"] / a["median"] if higher_is_better(name) else a["median"] / b["median"]
    overlap = a["min"] <= b["max"] and b["min"] <= a["max"]
    return f"({ratio:.2f} x)" if overlap else f"{ratio:.2f} x"
