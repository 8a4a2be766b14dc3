"""Throughput: all requests at once, as many tokens per second as the engine makes of them.

The presets are nano-vllm's published workload (default on a GPU) and a smaller one (default on a CPU). `output_tok_s_share` is
of the limit: one prefill of all prompts, then decode steps of all unfinished sequences, each step as fast as the device
reads and multiplies. `prefill_limit_share` and `decode_limit_share` measure the steps as they were batched.
"""

from __future__ import annotations

import argparse

from benchmarks.drive import Run
from benchmarks.figures import Figures, latency_figures, step_figures
from benchmarks.limit import Ceiling
from benchmarks.options import add_model_options, add_run_options, add_vs_option, check_range, positive_int
from benchmarks.report import Case, Report
from benchmarks.session import Session, open_session
from benchmarks.workload import PRESETS, Workload, random_workload

WARM_UP_TOKENS = 4
HOPELESS = 10  # a peer so many times slower is not worth the wait


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset", choices=PRESETS, help="a named workload (default: nano-vllm on a GPU, cpu on a CPU)"
    )
    parser.add_argument("--num-seqs", type=positive_int, help="requests, instead of the preset's")
    parser.add_argument("--input-len", type=positive_int, nargs=2, metavar=("LOW", "HIGH"), help="tokens of a prompt")
    parser.add_argument("--output-len", type=positive_int, nargs=2, metavar=("LOW", "HIGH"), help="tokens to generate")
    add_vs_option(parser)
    add_model_options(parser)
    add_run_options(parser, repeat=5)


def run(args: argparse.Namespace, report: Report) -> None:
    preset = PRESETS[args.preset or default_preset(args.device)]
    count = args.num_seqs or preset.num_seqs
    inputs = check_range("--input-len", tuple(args.input_len or preset.input_len))
    outputs = check_range("--output-len", tuple(args.output_len or preset.output_len))
    case: Case = {"num_seqs": count, "input_len": "{}-{}".format(*inputs), "output_len": "{}-{}".format(*outputs)}
    with open_session(args, report, inputs[1] + outputs[1]) as session:
        workload = random_workload(count, inputs, outputs, session.vocab_size, args.seed)
        report.facts |= {
            "prompt_tokens": sum(map(len, workload.prompts)),
            "output_tokens": workload.num_output_tokens,
        }
        _warm_up(session, workload)
        for repetition in range(args.repeat):
            ceiling = session.measure_ceiling()
            ours = session.run(workload, f"repetition {repetition + 1} of {args.repeat}")
            report.add(case, _figures(session, workload, ours, ceiling))
            report.sample("ttft_ms", "nanoengine", (1000 * request.ttft for request in ours.requests))
            report.sample("itl_ms", "nanoengine", (1000 * gap for request in ours.requests for gap in request.itls))
            for peer in session.peers:
                theirs = peer.run(workload)
                report.add(case, {"output_tok_s": workload.num_output_tokens / theirs.seconds}, peer.name)
            if ours.num_preemptions:
                report.warn(f"{ours.num_preemptions} preemptions in a run: the KV pool is small for this workload")


def default_preset(device: str) -> str:
    import torch

    return "nano-vllm" if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()) else "cpu"


def _warm_up(session: Session, workload: Workload) -> None:
    """All prompts, a few tokens each: every size of step but the last ones has been seen. A peer that cannot is left out."""
    ours = session.run(workload.cut(WARM_UP_TOKENS), "warm-up").seconds
    for peer in list(session.peers):
        try:
            theirs = peer.run(workload.cut(WARM_UP_TOKENS)).seconds
            reason = (
                f"took {theirs:.1f} s for the warm-up, nanoengine {ours:.1f} s" if theirs > HOPELESS * ours else None
            )
        except (RuntimeError, MemoryError) as error:
            reason = f"does not run here: {error}"
        if reason is not None:
            session.peers.remove(peer)
            session.report.warn(f"left out: {peer.name} {reason}")


def _figures(session: Session, workload: Workload, run: Run, ceiling: Ceiling) -> Figures:
    least = session.limit.workload_seconds(workload, ceiling)
    return (
        {"output_tok_s": workload.num_output_tokens / run.seconds, "output_tok_s_share": least / run.seconds}
        | latency_figures(run.requests)
        | step_figures(run.steps, session.limit, ceiling)
        | {"kv_waste": run.kv_waste, "preemptions": float(run.num_preemptions)}
    )
