"""Five fixed workloads, greedy, each beside its limit: the ones on which other engines were measured (benchmarks/cpu.md).

one stream      one request, 128 prompt and 128 new tokens
offline         32 requests at once, prompts of 16 to 256 tokens, 16 to 128 new ones
long prompt     one request, 2,048 prompt tokens, 1 new
shared prefix   16 requests of 512 tokens that are in the cache and 32 of their own, 16 new ones
streams         16 requests, 64 prompt and 64 new tokens

`limit_share` is of the limit of all steps as they were batched, and their time includes everything: the model, the scheduler,
what happens between two steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.drive import Kind, Run
from benchmarks.figures import Figures, step_figures
from benchmarks.limit import Ceiling
from benchmarks.options import add_model_options, add_run_options
from benchmarks.report import Report
from benchmarks.session import Session, open_session
from benchmarks.workload import CPU, Workload, random_workload

NAMES = ("one stream", "offline", "long prompt", "shared prefix", "streams")
SHARED = 512  # tokens
LONGEST = 2048 + 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=NAMES, action="append", metavar="NAME", help="one of them; may be repeated")
    add_model_options(parser)
    add_run_options(parser, repeat=3)


def run(args: argparse.Namespace, report: Report) -> None:
    names: Sequence[str] = args.only or NAMES
    with open_session(args, report, LONGEST) as session:
        warm_up = random_workload(4, (16, 64), (4, 4), session.vocab_size, args.seed)
        session.run(warm_up, "warm-up", temperature=0.0)
        for repetition in range(args.repeat):
            ceiling = session.measure_ceiling()
            for name in names:
                workload = _workload(name, session, args.seed + 100 * repetition)
                if name == "shared prefix":
                    session.run(Workload([workload.prompts[0][:SHARED]], [1]), "prefix", temperature=0.0)
                label = f"{name}, repetition {repetition + 1} of {args.repeat}"
                result = session.run(workload, label, keep_cache=name == "shared prefix", temperature=0.0)
                report.add({"workload": name}, _figures(name, session, result, ceiling))


def _workload(name: str, session: Session, seed: int) -> Workload:
    if name == "offline":
        return random_workload(*CPU, session.vocab_size, seed)
    if name == "shared prefix":
        prefix = session.tokens(SHARED, seed)
        return Workload([prefix + session.tokens(32, seed + i) for i in range(1, 17)], [16] * 16)
    count, prompt, output = {"one stream": (1, 128, 128), "long prompt": (1, 2048, 1), "streams": (16, 64, 64)}[name]
    return Workload([session.tokens(prompt, seed + i) for i in range(count)], [output] * count)


def _figures(name: str, session: Session, run: Run, ceiling: Ceiling) -> Figures:
    least = sum(session.limit.seconds(step.work, ceiling) for step in run.steps)
    figures = {"limit_share": least / run.seconds} | step_figures(run.steps, session.limit, ceiling)
    if name == "one stream":
        [request] = run.requests
        assert request.tpot is not None
        return {"ttft_ms": 1000 * request.ttft, "tpot_ms": 1000 * request.tpot} | figures
    if name == "long prompt":
        return {"prefill_tok_s": run.requests[0].num_prompt_tokens / run.seconds} | figures
    if name == "shared prefix":
        return {"seconds": run.seconds} | figures
    if name == "streams":
        decodes = [step for step in run.steps if step.kind is Kind.DECODE]
        seconds = decodes[-1].end - decodes[0].start
        return {"decode_tok_s": sum(step.num_seqs for step in decodes) / seconds} | figures
    return {"output_tok_s": run.num_output_tokens / run.seconds} | figures
