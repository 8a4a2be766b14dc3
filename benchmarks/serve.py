"""Serving: requests arrive on their own schedule, whether or not the engine keeps up (an open loop).

TTFT and end-to-end times count from the moment a request was due. Without --rate, the engine's capacity is measured with all
requests at once, and the sweep goes from a quarter of it to beyond it. --slo turns latencies into goodput: the requests per
second that met all objectives. --policy and --chunk compare ways to share out the steps.
"""

from __future__ import annotations

import argparse
from itertools import product

from benchmarks.drive import Run
from benchmarks.figures import Figures, goodput, latency_figures, step_figures
from benchmarks.options import add_model_options, add_run_options, check_range, positive_float, positive_int
from benchmarks.policies import add_policy_options, scheduling, variants
from benchmarks.report import Report
from benchmarks.session import Session, open_session
from benchmarks.workload import CPU, Workload, constant_arrivals, poisson_arrivals, random_workload

LOADS = (0.25, 0.5, 0.75, 1.0, 1.25)  # of the measured capacity


def slo(text: str) -> dict[str, float]:
    """`ttft=200,tpot=50`: milliseconds."""
    objectives: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in ("ttft", "tpot", "e2e"):
            raise argparse.ArgumentTypeError(
                f"{part!r}: objectives are ttft, tpot and e2e, such as ttft=200,tpot=50 (ms)"
            )
        objectives[name] = positive_float(value)
    return objectives


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rate", type=positive_float, nargs="+", help="requests per second (default: a sweep around capacity)"
    )
    parser.add_argument("--arrivals", choices=["poisson", "constant"], default="poisson")
    parser.add_argument("--slo", type=slo, metavar="ttft=MS,tpot=MS", help="objectives for goodput; also e2e")
    parser.add_argument("--num-seqs", type=positive_int, default=64, help="requests at each rate (default: 64)")
    parser.add_argument("--input-len", type=positive_int, nargs=2, default=CPU.input_len, metavar=("LOW", "HIGH"))
    parser.add_argument("--output-len", type=positive_int, nargs=2, default=CPU.output_len, metavar=("LOW", "HIGH"))
    add_policy_options(parser)
    add_model_options(parser)
    add_run_options(parser, repeat=3)


def run(args: argparse.Namespace, report: Report) -> None:
    inputs, outputs = (
        check_range("--input-len", tuple(args.input_len)),
        check_range("--output-len", tuple(args.output_len)),
    )
    with open_session(args, report, inputs[1] + outputs[1]) as session:
        workload = random_workload(args.num_seqs, inputs, outputs, session.vocab_size, args.seed)
        session.run(workload.cut(4), "warm-up")
        rates = args.rate or _sweep(session, workload)
        for repetition in range(args.repeat):
            ceiling = session.measure_ceiling()
            for rate, variant in product(rates, variants(args, session.scheduler)):
                arriving = workload.arriving(arrival_times(args.arrivals, rate, len(workload), args.seed + repetition))
                name = f"{rate:.3g} req/s, {variant.policy}, {variant.chunk}"
                with scheduling(session.scheduler, variant):
                    run = session.run(arriving, f"{name}, {repetition + 1} of {args.repeat}")
                figures = serve_figures(run, args.slo) | step_figures(run.steps, session.limit, ceiling)
                report.add(variant.case | {"rate": round(rate, 3)}, figures)
                report.sample("ttft_ms", name, (1000 * request.ttft for request in run.requests))
                report.sample("itl_ms", name, (1000 * gap for request in run.requests for gap in request.itls))


def _sweep(session: Session, workload: Workload) -> list[float]:
    capacity = len(workload) / session.run(workload, "measuring capacity").seconds
    session.report.facts["capacity_req_s"] = capacity
    return [load * capacity for load in LOADS]


def arrival_times(kind: str, rate: float, count: int, seed: int) -> list[float]:
    return poisson_arrivals(rate, count, seed) if kind == "poisson" else constant_arrivals(rate, count)


def serve_figures(run: Run, objectives: dict[str, float] | None) -> Figures:
    rates = {"output_tok_s": run.num_output_tokens / run.seconds, "finished_req_s": len(run.requests) / run.seconds}
    met = goodput(run, objectives) if objectives else {}
    return rates | met | latency_figures(run.requests, detailed=True) | {"preemptions": float(run.num_preemptions)}
