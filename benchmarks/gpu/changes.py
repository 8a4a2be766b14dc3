"""What mends have changed: of every row that was measured before and after, its main figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.figures import higher_is_better
from benchmarks.report import align, show_spread

MAIN = ("us", "output_tok_s", "tpot_ms", "ttft_ms", "step_ms", "busy_share", "launch_us", "differing", "first_token_s")
"""Figures that are shown. Of a kernel there is one; an engine has several."""


def changes(before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]) -> list[str]:
    """A table of the rows that both have: before, after, and how many times as good it is now."""
    old = {_key(row): row["figures"] for report in before for row in report["rows"]}
    table = [["case", "figure", "before", "after", "better"]]
    for report in after:
        for row in report["rows"]:
            was = old.get(_key(row), {})
            for name in MAIN:
                if name in was and name in row["figures"]:
                    table.append([_key(row), name, *_compared(name, was[name], row["figures"][name])])
    return list(align(table))


def _key(row: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value}" if name not in ("work", "kernel") else value for name, value in row["case"].items()
    )


def _compared(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    a, b = before["median"], after["median"]
    more_is_better = higher_is_better(name) or name == "busy_share"
    ratio = f"{b / a if more_is_better else a / b:.2f} x" if a > 0 and b > 0 else ""
    return [show_spread(before), show_spread(after), ratio]
