"""The table of workloads (benchmarks/workload.py), greedy, each beside the limit of the machine.

one stream          one request, 128 prompt and 128 new tokens; the same behind 1,024 prompt tokens
streams             16 requests, 64 prompt and 64 new tokens: how fast many decode
prompt of 512       one request, 1 new token: how fast a prompt is computed; "long prompt" has 2,048
shared prefix       16 requests of 512 tokens that are in the cache and 32 of their own, 16 new ones
offline             32 requests at once, prompts of 16 to 256 tokens, 16 to 128 new ones
nano-vllm           the published workload of nano-vllm: 256 requests of 100 to 1,024 tokens in, and as many out (only if named)

`limit_share` is of the limit of all steps as they were batched, and their time includes everything: the model, the scheduler,
what happens between two steps. --beside, --grammar and --adapters answer the same requests in other ways too, turn by turn.
"""

from __future__ import annotations

import argparse

from benchmarks.drive import Run
from benchmarks.figures import Figures, step_figures, stream_figures
from benchmarks.limit import Ceiling
from benchmarks.options import add_model_options, add_run_options, positive_int
from benchmarks.report import Report
from benchmarks.session import Session, open_session
from benchmarks.ways import add_way_options, ways_of
from benchmarks.workload import SCENARIOS, Scenario

WARM_UP_TOKENS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", choices=SCENARIOS, action="append", metavar="NAME", help="one of them; may be repeated"
    )
    parser.add_argument(
        "--own",
        type=positive_int,
        nargs=3,
        action="append",
        metavar=("REQUESTS", "INPUT", "OUTPUT"),
        help="so many requests at once, each of so many tokens in and out; may be repeated",
    )
    add_way_options(parser)
    add_model_options(parser)
    add_run_options(parser, repeat=3)


def chosen(args: argparse.Namespace) -> dict[str, Scenario]:
    """The scenarios that the options ask for."""
    own = {
        f"{count} of {into} + {out}": Scenario(count, (into, into), (out, out), "")
        for count, into, out in args.own or ()
    }
    names = args.only or ([] if own else [name for name in SCENARIOS if name != "nano-vllm"])
    return {name: SCENARIOS[name] for name in names} | own


def run(args: argparse.Namespace, report: Report) -> None:
    scenarios = chosen(args)
    longest = max(own.longest for own in scenarios.values())
    with open_session(args, report, longest) as session, ways_of(args, session) as ways:
        for repetition in range(-1, args.repeat):  # -1 is the warm-up
            ceiling = session.measure_ceiling()
            turn = f"{repetition + 1} of {args.repeat}" if repetition >= 0 else "warm-up"
            for name, scenario in scenarios.items():
                workload = scenario.workload(session.vocab_size, args.seed + 100 * repetition)
                alone = 0.0  # seconds of the plain way
                for way in ways:
                    prefix = scenario.prefix(workload)
                    if prefix is not None:
                        session.run(prefix, "prefix", temperature=0.0, adapt=way.adapt)
                    work = workload.cut(WARM_UP_TOKENS) if repetition < 0 else workload
                    with way.around():
                        run = session.run(
                            work,
                            f"{name}, {way.name}, {turn}",
                            keep_cache=prefix is not None,
                            temperature=0.0,
                            params=way.params,
                            adapt=way.adapt,
                        )
                    alone = alone or run.seconds
                    if run.num_preemptions:
                        report.warn(f"{name}: preemptions in a run: the KV pool is small for this workload")
                    if repetition >= 0:
                        figures = _figures(session, run, ceiling) | way.more(alone / run.seconds)
                        report.add({"workload": name}, figures, way.name)


def _figures(session: Session, run: Run, ceiling: Ceiling) -> Figures:
    least = sum(session.limit.seconds(step.work, ceiling) for step in run.steps)
    return (
        {"seconds": run.seconds, "output_tok_s": run.num_output_tokens / run.seconds}
        | {"limit_share": least / run.seconds}
        | stream_figures(run)
        | step_figures(run.steps, session.limit, ceiling)
        | {"steps": float(len(run.steps)), "kv_waste": run.kv_waste, "preemptions": float(run.num_preemptions)}
    )
