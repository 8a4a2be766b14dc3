"""A benchmark in parts that run one after the other, such that one which fails, or is cut short, loses no other."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from benchmarks.limit import Ceiling
from benchmarks.report import Report

SETTLING_STEPS = 8
"""Decode steps before others are timed."""


@contextmanager
def kept_going(report: Report, part: str) -> Iterator[None]:
    """A part that fails is reported, and the next one runs. After Ctrl-C none does."""
    try:
        yield
    except Exception as error:  # whatever it is, the other parts are worth having
        traceback.print_exception(error)
        report.facts.setdefault("failed", []).append(part)
        report.warn(f"{part} failed: {type(error).__name__}: {error}")


@dataclass
class Bench:
    """What all parts share."""

    args: argparse.Namespace
    report: Report
    ceiling: Ceiling

    def run(self, name: str, part: Callable[[], None]) -> None:
        """One part, if it is wanted; what it has found is saved, however it ends."""
        if name not in self.args.parts:
            return
        start = perf_counter()
        try:
            with kept_going(self.report, name):
                part()
        finally:
            self.report.facts.setdefault("seconds", {})[name] = round(perf_counter() - start, 1)
            if self.args.save:
                self.report.save(self.args.save)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        args = self.args
        return max(
            args.stream_len[0] + args.stream_len[1],
            args.input_len[1] + args.output_len[1],
            args.decode_len + self.decode_tokens,
        )

    @property
    def decode_tokens(self) -> int:
        """New tokens of a sequence in the decode steps that are timed and those that are profiled."""
        return 2 * self.args.decode_steps + 3 * SETTLING_STEPS
