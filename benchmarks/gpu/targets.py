"""The targets of the CUDA path, and whether saved measurements meet them.

    python -m benchmarks.gpu.targets kernels.json engine.json

prints a line for each target: the goal, what was measured, and "met", "missed" or "not run". A file may be missing. The calls of
gpu.sh end with the same table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import align


@dataclass(frozen=True)
class Target:
    """What one figure of one row should be.

    Args:
        name: what is measured, in words.
        case: of the row; other keys of it may be anything.
        figure: of which the median counts.
        goal: at least this, or if `at_most`, at most; None: it is only shown.
        unit: how it is shown; "%" shows a share of 1.
    """

    name: str
    case: dict[str, Any]
    figure: str
    goal: float | None
    unit: str
    at_most: bool = False

    def measured(self, reports: Iterable[dict[str, Any]]) -> float | None:
        """The figure in the first report that has it."""
        for report in reports:
            for row in report["rows"]:
                if self.case.items() <= row["case"].items() and self.figure in row["figures"]:
                    return float(row["figures"][self.figure]["median"])
        return None

    def verdict(self, measured: float | None) -> str:
        if measured is None:
            return "not run"
        if self.goal is None:
            return ""
        return "met" if (measured <= self.goal if self.at_most else measured >= self.goal) else "missed"

    def show(self, value: float | None) -> str:
        if value is None:
            return "-"
        return (
            f"{100 * value:.1f} %"
            if self.unit == "%"
            else f"{value:,.0f} {self.unit}"
            if value >= 10_000
            else f"{value:.4g} {self.unit}".strip()
        )


DECODE = {"kernel": "decode attention", "backend": "triton", "batch": 64, "context": 2048}
FASTEST = {"mode": "overlap, graphs"}
STREAM = {"work": "one stream", **FASTEST}
TARGETS = (
    Target("decode attention, 64 x 2,048 tokens, blocks of 16: of the bandwidth", DECODE, "bandwidth_share", 0.85, "%"),
    Target("one stream: TTFT, 1,024 prompt tokens", STREAM, "ttft_ms", 4.0, "ms", at_most=True),
    Target("one stream: TPOT", STREAM, "tpot_ms", 0.7, "ms", at_most=True),
    Target("256 requests: of the limit", {"work": "workload", **FASTEST}, "output_tok_s_share", 0.70, "%"),
    Target("256 requests: output tokens a second", {"work": "workload", **FASTEST}, "output_tok_s", 25_500, "/s"),
    Target("decode of 256: GPU busy", {"work": "decode", "num_seqs": 256, **FASTEST}, "busy_share", 0.97, "%"),
    Target("float32: requests that the mode changes", {"work": "equal tokens"}, "differing", 0, "", at_most=True),
    Target("256 requests: two steps in flight against one", {"work": "overlap"}, "times_as_fast", None, "x"),
)
"""For an H200. The last one has no goal: steps take the device 5 ms, and the host less than 1 ms, so there is little to hide."""


def lines(reports: Sequence[dict[str, Any]], targets: Sequence[Target] = TARGETS) -> list[str]:
    """The table."""
    rows = [["target", "goal", "measured", ""]]
    for target in targets:
        value = target.measured(reports)
        goal = "-" if target.goal is None else f"{'<=' if target.at_most else '>='} {target.show(target.goal)}"
        rows.append([target.name, goal, target.show(value), target.verdict(value)])
    return list(align(rows))


def main(paths: Sequence[str]) -> None:
    reports = [json.loads(Path(path).read_text()) for path in paths if Path(path).exists()]
    print("\n".join(lines(reports)))


if __name__ == "__main__":
    main(sys.argv[1:])
