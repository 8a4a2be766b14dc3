"""Structured outputs: time per token and to the first one with a grammar and without, of the same prompts and as many tokens.

Every text is the beginning of a list of records that a JSON schema describes; `--output-len` tokens of it. Three ways, in turn on
one engine: with forced tokens as drafts, without them (`speculate=False`), and without a grammar. The tokens of the first two are
compared, and must be equal.

compile_ms    the grammar of a schema that nobody has asked for before
mask_us       filling the masks of a step, per mask; p99 is over steps
wait_us       how long the sampler waited for them behind the forward pass
forced_share  of the tokens: those that were drafts because the grammar left no choice
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from weakref import WeakSet

import numpy as np

from benchmarks.drive import Run
from benchmarks.figures import Figures, latency_figures, percentiles
from benchmarks.options import BadOption, add_model_options, add_run_options, positive_int
from benchmarks.report import ENGINE, Case, Report
from benchmarks.session import Session, open_session
from benchmarks.workload import Workload
from nanoengine.structured.forced import ForcedDrafts
from nanoengine.structured.params import StructuredOutputs
from nanoengine.structured.structured import StepMasks, Structured

NOT_FORCED, PLAIN = "without forced tokens", "without a grammar"
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["administrator", "developer", "visitor"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}, "maxItems": 3},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "role", "tags", "active"],
    "additionalProperties": False,
}
MAX_TOKENS = 4000
"""Of a text: each record has more than 8, and there are 500."""

SCHEMA: dict[str, Any] = {"type": "array", "items": RECORD, "minItems": 500}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count: dict[str, Any] = {"type": positive_int, "metavar": "N"}
    parser.add_argument("--streams", **count, nargs="+", default=[1, 16], help="at once (default: 1 16)")
    parser.add_argument("--input-len", **count, default=64, help="tokens of each prompt (default: 64)")
    parser.add_argument("--output-len", **count, default=200, help="tokens of each text (default: 200)")
    add_model_options(parser)
    add_run_options(parser, repeat=3)


def run(args: argparse.Namespace, report: Report) -> None:
    if args.output_len > MAX_TOKENS:
        raise BadOption(f"--output-len is {args.output_len}: at most {MAX_TOKENS} can be, so that no text ends before")
    with open_session(args, report, args.input_len + args.output_len) as session:
        meter = Meter(part_of(session))
        for repetition in range(-1, args.repeat):  # -1 is the warm-up
            for streams in args.streams:
                seed = args.seed + 1000 * (repetition + 1)
                prompts = [session.tokens(args.input_len, seed + i) for i in range(streams)]
                turns = Turns(session, meter, Workload(prompts, [args.output_len] * streams))
                # Another way is first each time: none is always the later one.
                ways = [ENGINE, NOT_FORCED, PLAIN]
                found = {way: turns.take(way) for way in ways[repetition % 3 :] + ways[: repetition % 3]}
                if repetition >= 0:
                    case: Case = {"streams": streams}
                    for way in ways:
                        report.add(case, found[way], way)
            if repetition >= 0:
                report.add({}, {"compile_ms": 1000 * compile_seconds(meter.part, repetition)}, "a new schema")


def part_of(session: Session) -> Structured:
    found = [part for part in session.scheduler.parts if isinstance(part, Structured)]
    if not found:
        raise BadOption("structured outputs are not installed: pip install llguidance")
    return found[0]


def compile_seconds(part: Structured, number: int) -> float:
    outputs = StructuredOutputs(json=SCHEMA | {"description": f"number {number}"})
    start = perf_counter()
    part.grammars.matcher(outputs)
    return perf_counter() - start


@dataclass
class Meter:
    """Times the masks of an engine. All times are in microseconds.

    Args:
        part: of the engine's policy.
    """

    part: Structured
    mask_us: list[float] = field(default_factory=list)
    wait_us: list[float] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        fill, wait = self.part._fill, StepMasks.wait
        waited = WeakSet[StepMasks]()  # once more when a step is over, which takes no time
        self.mask_us, self.wait_us = [], []

        def timed_fill(asked: Any) -> np.ndarray:
            start = perf_counter()
            bits = fill(asked)
            self.mask_us.append(1e6 * (perf_counter() - start) / len(bits))
            return bits

        def timed_wait(masks: StepMasks) -> np.ndarray:
            start = perf_counter()
            bits = wait(masks)
            if masks not in waited:
                self.wait_us.append(1e6 * (perf_counter() - start))
                waited.add(masks)
            return bits

        self.part._fill, StepMasks.wait = timed_fill, timed_wait  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            self.part._fill, StepMasks.wait = fill, wait  # type: ignore[method-assign]

    def figures(self) -> Figures:
        found = percentiles("mask_us", self.mask_us, detailed=True)
        found |= percentiles("wait_us", self.wait_us, detailed=True)
        return {name: value for name, value in found.items() if not name.endswith(("_mean", "_p90"))}


class Turns:
    """The same requests each way."""

    def __init__(self, session: Session, meter: Meter, workload: Workload):
        self.session, self.meter, self.workload = session, meter, workload
        self.outputs = StructuredOutputs(json=SCHEMA)
        self.tokens: list[list[int]] | None = None

    def take(self, way: str) -> Figures:
        params: dict[str, Any] = {"seed": 1, "speculate": way == ENGINE}
        if way != PLAIN:
            params["structured_outputs"] = self.outputs
        drafter = self.meter.part.drafter
        before = drafter.num_accepted if isinstance(drafter, ForcedDrafts) else 0
        with self.meter.running():
            run = self.session.run(self.workload, way, params=params)
        figures = latency_figures(run.requests) | {"output_tok_s": run.num_output_tokens / run.seconds}
        figures |= {"steps": float(len(run.steps))}
        if way == PLAIN:
            return figures
        self._compare(run)
        forced = drafter.num_accepted - before if isinstance(drafter, ForcedDrafts) else 0
        return figures | self.meter.figures() | {"forced_share": forced / run.num_output_tokens}

    def _compare(self, run: Run) -> None:
        tokens = [request.output_token_ids for request in run.requests]
        if [len(own) for own in tokens] != self.workload.output_lens:
            self.session.report.warn("a text ended before --output-len: tokens per second are of fewer streams then")
        if self.tokens is not None and tokens != self.tokens:
            self.session.report.warn("tokens with forced tokens and without differ")
        self.tokens = tokens
