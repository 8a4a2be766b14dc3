"""One prefill and one decode step, operation by operation: where the time of a step goes.

`ms` is the time in an operation itself, not in those that it calls. "(between operations)" is the rest of the step: Python,
the scheduler, and what the profiler itself costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter

from torch.profiler import ProfilerActivity, profile

from benchmarks.options import add_model_options, add_run_options, positive_int
from benchmarks.report import Report
from benchmarks.session import Session, open_session
from nanoengine import SamplingParams
from nanoengine.core.sequence import Phase

DECODE_STEPS = 16
REST = "(between operations)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-seqs", type=positive_int, default=1, help="sequences (default: 1)")
    parser.add_argument("--input-len", type=positive_int, default=128, help="tokens of each prompt (default: 128)")
    parser.add_argument("--top", type=positive_int, default=10, help="operations to show (default: 10)")
    add_model_options(parser)
    add_run_options(parser, repeat=3)


def run(args: argparse.Namespace, report: Report) -> None:
    with open_session(args, report, args.input_len + DECODE_STEPS + 1) as session:
        for repetition in range(-1, args.repeat):  # -1 warms up
            steps = _profile(session, args.num_seqs, args.input_len, args.seed + 1000 * repetition)
            if repetition >= 0:
                for step, operations in steps.items():
                    _report(report, step, operations, args.top)


def _report(report: Report, step: str, operations: dict[str, float], top: int) -> None:
    total = sum(operations.values())
    report.add({"step": step, "operation": "(all)"}, {"ms": total, "share": 1.0})
    for name in sorted(operations, key=operations.__getitem__, reverse=True)[:top]:
        report.add({"step": step, "operation": name}, {"ms": operations[name], "share": operations[name] / total})


def _profile(session: Session, num_seqs: int, input_len: int, seed: int) -> dict[str, dict[str, float]]:
    """Milliseconds by operation, for a prefill of all prompts and for a decode step of all sequences."""
    engine = session.llm.engine
    session.llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=DECODE_STEPS + 1)
    requests = [engine.make_request(session.tokens(input_len, seed + i), params) for i in range(num_seqs)]
    for request in requests:
        engine.submit(request)

    def prefill() -> None:
        while any(seq.phase in (Phase.WAITING, Phase.PREFILLING) for request in requests for seq in request.sequences):
            engine.step()

    def decode() -> None:
        while engine.has_unfinished:
            engine.step()

    return {
        f"prefill of {num_seqs} x {input_len}": _by_operation(prefill, 1),
        f"decode step of {num_seqs}": _by_operation(decode, DECODE_STEPS),
    }


def _by_operation(work: Callable[[], None], count: int) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = perf_counter()
        work()
        seconds = perf_counter() - start
    milliseconds = {event.key: event.self_cpu_time_total / 1000 / count for event in profiler.key_averages()}
    milliseconds[REST] = max(1000 * seconds / count - sum(milliseconds.values()), 0.0)
    return milliseconds
