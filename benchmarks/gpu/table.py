"""Before, after and goal of the figures that count, from what the calls of gpu.sh have saved.

python -m benchmarks.gpu.table OUT/figures.tsv
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import align


@dataclass(frozen=True)
class Line:
    """One figure of one row, in the reports of some stages.

    Args:
        name: what is measured, in words.
        case: of the row; other keys of it may be anything.
        figure: of which the median counts.
        unit: how it is shown; "%" shows a share of 1.
        goal: on an H200; at least this, or if `at_most`, at most.
        stages: whose reports have it: before, and after.
    """

    name: str
    case: Mapping[str, Any]
    figure: str
    unit: str
    goal: float | None = None
    at_most: bool = False
    stages: tuple[str, str] = ("before", "after")

    def cells(self, reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
        found = [self._measured(reports.get(stage)) for stage in self.stages]
        goal = "" if self.goal is None else f"{'<=' if self.at_most else '>='} {self._shown(self.goal)}"
        verdict = ""
        if self.goal is not None and found[1] is not None:
            verdict = "met" if (found[1] <= self.goal if self.at_most else found[1] >= self.goal) else "missed"
        return [self.name, *map(self._shown, found), goal, verdict]

    def _measured(self, report: Mapping[str, Any] | None) -> float | None:
        for row in (report or {"rows": ()})["rows"]:
            if self.case.items() <= row["case"].items() and self.figure in row["figures"]:
                return float(row["figures"][self.figure]["median"])
        return None

    def _shown(self, value: float | None) -> str:
        if value is None:
            return "-"
        if self.unit == "%":
            return f"{100 * value:.1f} %"
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g} {self.unit}".strip()


STREAM, WORKLOAD = {"work": "one stream"}, {"work": "workload"}
LINES = (
    Line("one stream: TTFT of 1,024 prompt tokens", STREAM, "ttft_ms", "ms", 3.5, True),
    Line("one stream: TPOT", STREAM, "tpot_ms", "ms", 0.62, True),
    Line("one stream: TPOT, of the limit", STREAM, "tpot_ms_share", "%"),
    Line("256 requests: output tokens a second", WORKLOAD, "output_tok_s", "", 28_400),
    Line("256 requests: of the limit", WORKLOAD, "output_tok_s_share", "%", 0.77),
    Line("256 requests: of the limit of one kernel after the other", WORKLOAD, "in_turn_tok_s_share", "%"),
    Line("256 requests, int8 K/V: output tokens a second", WORKLOAD, "output_tok_s", "", 34_000, stages=("", "int8kv")),
    Line("float32: requests that overlap or graphs change", {"work": "equal tokens"}, "differing", "", 0, True),
)


def lines(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield from align([["", "before", "after", "goal", ""], *(line.cells(reports) for line in LINES)])


def main(path: str) -> None:
    saved = (line.split("\t", 1) for line in Path(path).read_text().splitlines())
    print("\n".join(lines({stage: json.loads(report) for stage, report in saved})))


if __name__ == "__main__":
    main(*sys.argv[1:])
