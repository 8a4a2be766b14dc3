"""Latency: one stream at a time, over a grid of prompt and output lengths.

TTFT is the time to the first token, TPOT the mean time per token after it, ITL the gaps between tokens. The shares are of
the limit: the time of a prefill, or of the decode steps, in which the device only reads and multiplies what it must.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks.drive import Run
from benchmarks.figures import Figures, latency_figures, percentiles
from benchmarks.limit import Ceiling, StepWork
from benchmarks.options import add_model_options, add_run_options, add_vs_option, positive_int
from benchmarks.report import Case, Report
from benchmarks.session import Session, open_session
from benchmarks.workload import Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lengths: dict[str, Any] = {"type": positive_int, "nargs": "+", "metavar": "TOKENS"}
    parser.add_argument("--input-len", **lengths, default=[128, 1024], help="prompt lengths (default: 128 1024)")
    parser.add_argument("--output-len", **lengths, default=[32, 128], help="output lengths (default: 32 128)")
    add_vs_option(parser)
    add_model_options(parser)
    add_run_options(parser, repeat=5)


def run(args: argparse.Namespace, report: Report) -> None:
    grid = list(product(args.input_len, args.output_len))
    with open_session(args, report, max(args.input_len) + max(args.output_len)) as session:
        peers = [peer for peer in session.peers if peer.reports_tokens]
        for repetition in range(-1, args.repeat):  # -1 is the warm-up
            ceiling = session.measure_ceiling()
            for cell, (input_len, output_len) in enumerate(grid):
                seed = args.seed + 1000 * (repetition + 1) + cell
                workload = Workload([session.tokens(input_len, seed)], [output_len])
                label = f"{input_len} + {output_len}, " + (
                    "warm-up" if repetition < 0 else f"{repetition + 1} of {args.repeat}"
                )
                ours = session.run(workload, label)
                theirs = [peer.run(workload) for peer in peers]
                if repetition < 0:
                    continue
                case: Case = {"input_len": input_len, "output_len": output_len}
                figures = stream_figures(ours)
                report.add(case, figures | _shares(session, workload, figures, ceiling))
                for peer, its_run in zip(peers, theirs, strict=True):
                    report.add(case, stream_figures(its_run), peer.name)
                request = ours.requests[0]
                report.sample("ttft_ms", f"prompt {input_len}", [1000 * request.ttft])
                report.sample("itl_ms", f"prompt {input_len}", (1000 * gap for gap in request.itls))


def stream_figures(run: Run) -> Figures:
    figures = latency_figures(run.requests)
    gaps = [1000 * gap for request in run.requests for gap in request.itls]
    return figures | {
        name: value for name, value in percentiles("itl_ms", gaps, detailed=True).items() if "p99" in name
    }


def _shares(session: Session, workload: Workload, figures: Figures, ceiling: Ceiling) -> Figures:
    prefill = 1000 * session.limit.workload_seconds(replace(workload, output_lens=[1]), ceiling)
    shares = {"ttft_ms_share": prefill / figures["ttft_ms"]}
    if "tpot_ms" in figures:
        context = len(workload.prompts[0]) + workload.output_lens[0] // 2
        shares["tpot_ms_share"] = (
            1000 * session.limit.seconds(StepWork(1, 1, context, context), ceiling) / figures["tpot_ms"]
        )
    return shares
