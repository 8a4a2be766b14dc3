"""Report: figures as they come in, one set per repetition, and the ways to show them: tables, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import Figures, higher_is_better, spread

Case = dict[str, Any]
ENGINE = "nanoengine"
MOST_COLUMNS = 7


@dataclass
class Row:
    """One case on one engine: a list of values per figure, one for each repetition."""

    case: Case
    engine: str
    values: dict[str, list[float]] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        return {name: spread(values) for name, values in self.values.items()}


@dataclass
class Report:
    """Everything that a run of `bench.py` has to say. It is complete after every `add`, so it can be shown at any time.

    Args:
        mode: which benchmark.
        facts: what the figures depend on: versions, device, settings.
    """

    mode: str
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    interrupted: str | None = None

    def add(self, case: Case, figures: Figures, engine: str = ENGINE) -> None:
        """Take the figures of one repetition. A peer's go in right after ours on the same work: ratios pair them up."""
        row = self.find(case, engine)
        if row is None:
            row = Row(case, engine)
            self.rows.append(row)
        for name, value in figures.items():
            row.values.setdefault(name, []).append(value)

    def warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)

    def find(self, case: Case, engine: str) -> Row | None:
        return next((row for row in self.rows if row.case == case and row.engine == engine), None)

    def times_as_fast(self, row: Row) -> dict[str, dict[str, float]]:
        """How much better our figures are than those of a peer's row, repetition by repetition; of shares there is none."""
        ours = self.find(row.case, ENGINE)
        if ours is None or row.engine == ENGINE:
            return {}
        ratios: dict[str, dict[str, float]] = {}
        for name, theirs in row.values.items():
            if name.endswith(("_share", "_rate")):
                continue
            pairs = [(a, b) for a, b in zip(ours.values.get(name, []), theirs, strict=False) if a > 0 and b > 0]
            if pairs:
                ratios[name] = spread([a / b if higher_is_better(name) else b / a for a, b in pairs])
        return ratios

    # ---- showing it

    def as_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            **self.facts,
            "warnings": self.warnings,
            "interrupted": self.interrupted,
            "rows": [
                {"case": row.case, "engine": row.engine, "figures": row.figures}
                | ({"times_as_fast": ratios} if (ratios := self.times_as_fast(row)) else {})
                for row in self.rows
            ],
        }

    def show(self) -> None:
        """The tables (a cell is the median and half the range), and what to beware of."""
        print()
        for line in self._tables():
            print(line)
        for warning in self.warnings:
            print(f"warning: {warning}")
        if self.interrupted is not None:
            print(f"interrupted: {self.interrupted}")

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n")

    def _tables(self) -> Iterator[str]:
        """A table for each kind of case: cases down, figures across, a few at a time."""
        for keys in dict.fromkeys(tuple(row.case) for row in self.rows):
            rows = [row for row in self.rows if tuple(row.case) == keys]
            names = list(dict.fromkeys(name for row in rows for name in row.values))
            for start in range(0, len(names), MOST_COLUMNS):
                columns = names[start : start + MOST_COLUMNS]
                lines = [[*keys, "engine" if keys else "", *columns]]
                for row in rows:
                    case = [str(value) for value in row.case.values()]
                    lines += _lines(case, row.engine, row.figures, columns)
                    lines += _lines(case, "  times as fast", self.times_as_fast(row), columns)
                yield from align(lines)
                yield ""


def _lines(
    case: list[str], engine: str, figures: Mapping[str, dict[str, float]], columns: list[str]
) -> list[list[str]]:
    cells = [show_spread(figures[name]) if name in figures else "" for name in columns]
    return [[*case, engine, *cells]] if any(cells) else []


def show_spread(figure: Mapping[str, float]) -> str:
    """Such as `53.6 ±4%`: the median, and half the range as a share of it."""
    median = figure["median"]
    text = f"{median:.0f}" if abs(median) >= 1000 else f"{median:.3g}"
    if figure["repetitions"] > 1 and median:
        text += f" ±{(figure['max'] - figure['min']) / 2 / abs(median):.0%}"
    return text


def align(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns of equal width, words to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    is_text = [
        any(cell and not cell[0].isdigit() and cell[0] != "-" for cell in column[1:])
        for column in zip(*lines, strict=True)
    ]
    for line in lines:
        cells = (cell.ljust(w) if text else cell.rjust(w) for cell, w, text in zip(line, widths, is_text, strict=True))
        yield "  ".join(cells).rstrip()
