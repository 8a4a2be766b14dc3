"""Latency: one stream at a time, over a grid of prompt and output lengths.

TTFT is the time to the first token, TPOT the mean time per token after it, ITL the gaps between tokens. The shares are of
the limit: the time of a prefill, or of the decode steps, in which the device only reads and multiplies what it must.

With --beside N everything is measured twice, turn by turn: alone, and beside N processes that are always busy. `fair_share` is
then how much of its share of the CPUs the engine made use of: the time per token alone, divided by the share that is left to its
threads if all who want a CPU get the same, over the time per token that was measured.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from benchmarks.drive import Run
from benchmarks.figures import Figures, latency_figures, percentiles
from benchmarks.limit import Ceiling, StepWork
from benchmarks.neighbours import Neighbours, fair_share
from benchmarks.options import add_model_options, add_run_options, add_vs_option, positive_int
from benchmarks.report import ENGINE, Case, Report
from benchmarks.session import Session, open_session
from benchmarks.workload import Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lengths: dict[str, Any] = {"type": positive_int, "nargs": "+", "metavar": "TOKENS"}
    parser.add_argument("--input-len", **lengths, default=[128, 1024], help="prompt lengths (default: 128 1024)")
    parser.add_argument("--output-len", **lengths, default=[32, 128], help="output lengths (default: 32 128)")
    parser.add_argument("--beside", type=positive_int, metavar="N", help="measure beside N busy processes too")
    add_vs_option(parser)
    add_model_options(parser)
    add_run_options(parser, repeat=5)


def run(args: argparse.Namespace, report: Report) -> None:
    grid = list(product(args.input_len, args.output_len))
    longest = max(args.input_len) + max(args.output_len)
    with open_session(args, report, longest) as session, Neighbours(args.beside or 0) as neighbours:
        for repetition in range(-1, args.repeat):  # -1 is the warm-up
            ceiling = session.measure_ceiling()
            for cell, (input_len, output_len) in enumerate(grid):
                seed = args.seed + 1000 * (repetition + 1) + cell
                workload = Workload([session.tokens(input_len, seed)], [output_len])
                label = f"{input_len} + {output_len}, " + (
                    "warm-up" if repetition < 0 else f"{repetition + 1} of {args.repeat}"
                )
                alone = [session.run(workload, label), *(peer.run(workload) for peer in _streaming(session))]
                beside: list[Run] = []
                if args.beside:
                    with neighbours.let_loose():
                        beside = [session.run(workload, label), *(peer.run(workload) for peer in _streaming(session))]
                if repetition < 0:
                    continue
                case: Case = {"input_len": input_len, "output_len": output_len}
                if args.beside:
                    case["beside"] = 0
                for name, its_run in zip(_names(session), alone, strict=True):
                    figures = stream_figures(its_run)
                    shares = _shares(session, workload, figures, ceiling) if name == ENGINE else {}
                    report.add(case, figures | shares, name)
                for name, its_run, its_own in zip(_names(session), beside, alone, strict=False):
                    report.add(case | {"beside": args.beside}, beside_figures(its_run, its_own, args.beside), name)
                request = alone[0].requests[0]
                report.sample("ttft_ms", f"prompt {input_len}", [1000 * request.ttft])
                report.sample("itl_ms", f"prompt {input_len}", (1000 * gap for gap in request.itls))


def _streaming(session: Session) -> list[Any]:
    return [peer for peer in session.peers if peer.reports_tokens]


def _names(session: Session) -> list[str]:
    return [ENGINE, *(peer.name for peer in _streaming(session))]


def beside_figures(run: Run, alone: Run, neighbours: int) -> Figures:
    """Those of a stream beside busy processes, and what it made of its share."""
    figures, before = stream_figures(run), stream_figures(alone)
    if "tpot_ms" not in figures:
        return figures
    fair = before["tpot_ms"] / fair_share(torch.get_num_threads(), neighbours)
    return figures | {"fair_share": fair / figures["tpot_ms"]}


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
