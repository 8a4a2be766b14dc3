"""Prefix reuse: a system prompt that many requests share, and chats whose every turn repeats what came before.

Each runs with the prefix cache and without, on the same engine. `hit_rate` is the share of the prompt tokens that came from
the cache; `times as fast` compares with the run without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.drive import RequestTimes, Run
from benchmarks.figures import Figures, latency_figures, step_figures
from benchmarks.options import add_model_options, add_run_options, positive_int
from benchmarks.report import Case, Report
from benchmarks.session import Session, open_session
from benchmarks.workload import Workload

WITHOUT = "without prefix cache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count: dict[str, Any] = {"type": positive_int, "metavar": "N"}
    parser.add_argument("--num-seqs", **count, default=16, help="requests behind the system prompt (default: 16)")
    parser.add_argument("--prefix-len", **count, default=512, help="tokens of the system prompt (default: 512)")
    parser.add_argument("--chats", **count, default=8, help="conversations, side by side (default: 8)")
    parser.add_argument("--turns", **count, default=4, help="turns of each (default: 4)")
    parser.add_argument("--user-len", **count, default=32, help="tokens that each request or turn adds (default: 32)")
    parser.add_argument("--output-len", **count, default=16, help="tokens of each answer (default: 16)")
    add_model_options(parser)
    add_run_options(parser, repeat=3)


def run(args: argparse.Namespace, report: Report) -> None:
    longest = max(args.prefix_len + args.user_len + args.output_len, args.turns * (args.user_len + args.output_len))
    workloads: dict[str, Callable[..., list[Run]]] = {"system prompt": system_prompt, "chats": chats}
    with open_session(args, report, longest) as session:
        for repetition in range(-1, args.repeat):  # -1 is the warm-up
            ceiling = session.measure_ceiling()
            for name, workload in workloads.items():
                case: Case = {"workload": name}
                for engine in ("nanoengine", WITHOUT):
                    with prefix_caching(session, engine != WITHOUT):
                        runs = workload(session, args, args.seed + repetition)
                    if repetition >= 0:
                        steps = [step for run in runs for step in run.steps]
                        figures = prefix_figures(runs) | step_figures(steps, session.limit, ceiling)
                        report.add(case, figures, engine)
                        label = f"{name}, {'with' if engine != WITHOUT else 'without'} cache"
                        report.sample(
                            "ttft_ms", label, (1000 * request.ttft for run in runs for request in run.requests)
                        )


@contextmanager
def prefix_caching(session: Session, enabled: bool) -> Iterator[None]:
    """Switch the prefix cache of an idle engine: two engines would hold the weights twice."""
    blocks = session.scheduler.blocks
    before, blocks.enable_prefix_caching = blocks.enable_prefix_caching, enabled
    session.llm.reset_prefix_cache()
    try:
        yield
    finally:
        session.llm.reset_prefix_cache()
        blocks.enable_prefix_caching = before


def system_prompt(session: Session, args: argparse.Namespace, seed: int) -> list[Run]:
    """The prompt has been seen once; then all requests arrive, each with a question of its own behind it."""
    prefix = session.tokens(args.prefix_len, seed)
    questions = [session.tokens(args.user_len, 1000 * (seed + 1) + i) for i in range(args.num_seqs)]
    session.run(Workload([prefix], [1]), "system prompt", keep_cache=True)
    workload = Workload([prefix + question for question in questions], [args.output_len] * args.num_seqs)
    return [session.run(workload, "questions", keep_cache=True)]


def chats(session: Session, args: argparse.Namespace, seed: int) -> list[Run]:
    """All chats take their turns together; what a turn asks and answers is the beginning of the next."""
    histories: list[list[int]] = [[] for _ in range(args.chats)]
    runs = []
    for turn in range(args.turns):
        for i, history in enumerate(histories):
            history += session.tokens(args.user_len, 1000 * (seed + 1) + args.chats * turn + i)
        run = session.run(Workload(histories, [args.output_len] * args.chats), f"turn {turn + 1}", keep_cache=True)
        for history, request in zip(histories, run.requests, strict=True):
            history += request.output_token_ids
        runs.append(run)
    return runs


def prefix_figures(runs: list[Run]) -> Figures:
    requests: list[RequestTimes] = [request for run in runs for request in run.requests]
    cached = sum(request.num_cached_tokens for request in requests)
    prompts = sum(request.num_prompt_tokens for request in requests)
    return {
        "hit_rate": cached / prompts,
        "computed_tokens": float(sum(step.work.num_tokens for run in runs for step in run.steps)),
        "whole_run_ms": 1000 * sum(run.seconds for run in runs),
    } | latency_figures(requests)
