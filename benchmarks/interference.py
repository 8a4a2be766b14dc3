"""Long prompts beside running streams: what becomes of the streams while a prompt is computed, under each policy.

Some streams decode from the start. Prompts, of one new token each, arrive beside them on a schedule of their own, the same one
for every policy and chunk; without --rate, half as fast as the engine computes them alone. The streams stop with the last prompt.

`alone_ms` is the median step of the streams alone. `itl_ms` is of the gaps between the tokens of a stream in which some prompt
waited for its first token, `slowdown` the same over `alone_ms`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product

import numpy as np

from benchmarks.drive import Kind, Run
from benchmarks.figures import Figures, step_figures
from benchmarks.options import (
    BadOption,
    add_model_options,
    add_run_options,
    check_range,
    positive_float,
    positive_int,
)
from benchmarks.report import Report
from benchmarks.session import Session, open_session
from benchmarks.spans import merge
from benchmarks.workload import Range, Workload, random_workload
from nanoengine.core.config import POLICIES
from nanoengine.core.scheduler import Scheduler

LEAD_IN_TOKENS = 32  # of each stream, before the first prompt
LOAD = 0.5  # of the rate at which prompts are computed alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=positive_int, default=8, help="streams (default: 8)")
    parser.add_argument("--stream-input", type=positive_int, default=64, help="prompt tokens of each (default: 64)")
    parser.add_argument(
        "--stream-output", type=positive_int, default=2048, help="most new tokens of each (default: 2048)"
    )
    parser.add_argument("--num-prompts", type=positive_int, default=4, help="prompts beside them (default: 4)")
    parser.add_argument("--input-len", type=positive_int, nargs=2, default=(2048, 2048), metavar=("LOW", "HIGH"))
    parser.add_argument("--rate", type=positive_float, help="prompts per second")
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=POLICIES, help="(default: all)")
    parser.add_argument(
        "--chunk", type=positive_int, nargs="+", default=[256], metavar="TOKENS", help="most of a prompt in a step"
    )
    add_model_options(parser)
    add_run_options(parser, repeat=3)


def run(args: argparse.Namespace, report: Report) -> None:
    inputs = check_range("--input-len", tuple(args.input_len))
    if args.stream_output <= LEAD_IN_TOKENS:
        raise BadOption(
            f"--stream-output is {args.stream_output}: it must be above {LEAD_IN_TOKENS}, the tokens of each stream before "
            "the first prompt arrives"
        )
    with open_session(args, report, max(args.stream_input + args.stream_output, inputs[1] + 1)) as session:
        if args.streams >= session.scheduler.max_num_seqs:
            raise BadOption(
                f"--streams is {args.streams}, but only {session.scheduler.max_num_seqs} sequences can run at once "
                "(max_num_seqs, max_num_batched_tokens): leave room for a prompt"
            )
        lead_in, rate = measure_pace(session, args, inputs)
        report.facts["prompts_per_s"] = rate
        for repetition in range(-1, args.repeat):  # -1 warms up, with one prompt
            ceiling = session.measure_ceiling()
            for policy, chunk in product(args.policy, args.chunk):
                count = args.num_prompts if repetition >= 0 else 1
                workload = beside_streams(session, args, inputs, count, args.seed + repetition)
                label = f"{policy}, chunks of {chunk}, {repetition + 1} of {args.repeat}"
                with scheduling(session.scheduler, policy, chunk):
                    due = [0.0] * args.streams + [lead_in + i / rate for i in range(count)]
                    arriving = replace(workload, arrivals=due)
                    result = session.run(arriving, label, num_streams=args.streams)
                if repetition < 0:
                    continue
                figures = interference_figures(result, args.streams)
                case = {"policy": policy, "chunk": chunk}
                report.add(case, figures | step_figures(result.steps, session.limit, ceiling))
                warn_of_doubts(report, result, args)


@contextmanager
def scheduling(scheduler: Scheduler, policy: str, chunk: int) -> Iterator[None]:
    """Let the scheduler of an idle engine share out its steps in another way: two engines would hold the weights twice."""
    assert not scheduler.has_unfinished
    before = scheduler.policy, scheduler.max_chunk
    scheduler.policy, scheduler.max_chunk = policy, chunk
    try:
        yield
    finally:
        scheduler.policy, scheduler.max_chunk = before


def measure_pace(session: Session, args: argparse.Namespace, inputs: Range) -> tuple[float, float]:
    """Seconds that the streams take for their lead-in, and prompts per second: if it is not given, by what one takes alone."""
    streams = beside_streams(session, args, inputs, 0, args.seed)
    lead_in = min(session.run(streams.cut(LEAD_IN_TOKENS), "streams alone").seconds for _ in range(2))  # warm
    if args.rate:
        return lead_in, args.rate
    prompts = random_workload(2, inputs, (1, 1), session.vocab_size, args.seed)
    seconds = session.run(prompts, "prompts alone").seconds
    return lead_in, LOAD * len(prompts) / seconds


def beside_streams(session: Session, args: argparse.Namespace, inputs: Range, num_prompts: int, seed: int) -> Workload:
    """The streams, then so many prompts."""
    lengths, outputs = (args.stream_input,) * 2, (args.stream_output,) * 2
    streams = random_workload(args.streams, lengths, outputs, session.vocab_size, seed)
    prompts = random_workload(num_prompts, inputs, (1, 1), session.vocab_size, 1000 * (seed + 2))
    return Workload(streams.prompts + prompts.prompts, streams.output_lens + prompts.output_lens)


def stalls(run: Run, num_streams: int) -> list[float]:
    """Milliseconds between the tokens of a stream, wherever a prompt waited for its first token in that time."""
    waits = merge((prompt.due, prompt.token_times[0]) for prompt in run.requests[num_streams:])
    pairs = [pair for stream in run.requests[:num_streams] for pair in pairwise(stream.token_times)]
    return [1000 * (b - a) for a, b in pairs if any(a < end and start < b for start, end in waits)]


def interference_figures(run: Run, num_streams: int) -> Figures:
    steps = [step for step in run.steps if step.kind is Kind.DECODE and step.num_seqs == num_streams]
    alone = 1000 * statistics.median(step.end - step.start for step in steps)
    gaps = stalls(run, num_streams)
    return (
        {"alone_ms": alone}
        | _to_the_worst("itl_ms", gaps)
        | _to_the_worst("slowdown", [gap / alone for gap in gaps])
        | _to_the_worst("ttft_ms", [1000 * prompt.ttft for prompt in run.requests[num_streams:]])
    )


def _to_the_worst(name: str, values: list[float]) -> Figures:
    """Median, p99 and the highest."""
    if not values:
        return {}
    return {
        name: statistics.median(values),
        f"{name}_p99": float(np.percentile(values, 99)),
        f"{name}_max": max(values),
    }


def warn_of_doubts(report: Report, run: Run, args: argparse.Namespace) -> None:
    if any(len(stream.token_times) == args.stream_output for stream in run.requests[: args.streams]):
        report.warn("streams ended before the last prompt had its token: raise --stream-output, or lower --num-prompts")
    if run.num_preemptions:
        report.warn(f"{run.num_preemptions} preemptions in a run: the KV pool is small for these streams and prompts")
