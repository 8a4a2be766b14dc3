"""The whole engine on a GPU: start-up, one stream, the 256 requests of nano-vllm, and where the time of decode steps goes.

    python -m benchmarks.gpu.engine --random-weights qwen3-0.6b --save engine.json

The JSON is written after each part, so that a part that fails, or a run that is cut short, loses no other. On a CPU
(--device cpu, and small numbers) it runs too, without what only a GPU has, so that the program itself can be tried.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.drive import Run
from benchmarks.figures import Figures, latency_figures, step_figures, stream_figures
from benchmarks.gpu.clock import device_facts, measure_rates
from benchmarks.gpu.decode import decode
from benchmarks.gpu.modes import FASTEST, Mode, modes_of, running_in
from benchmarks.gpu.parts import Bench, kept_going
from benchmarks.limit import StepWork
from benchmarks.options import add_model_options, engine_options, positive_int
from benchmarks.peers import Settings, run_peer
from benchmarks.random_weights import random_checkpoint
from benchmarks.report import ENGINE, Report
from benchmarks.session import Session, open_session
from benchmarks.workload import NANO_VLLM, Workload, random_tokens, random_workload
from nanoengine import LLM, SamplingParams

PARTS = ("equal tokens", "one stream", "workload", "decode", "start-up")
ON_ONE_ENGINE = ("one stream", "workload", "decode")

WARM_UPS = 2
WARM_UP_TOKENS = 4


def main(arguments: Sequence[str]) -> int:
    args = _parser().parse_args(arguments)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(args.device)
    report = Report("gpu_engine", device_facts(device))
    rates = measure_rates(device, torch.bfloat16 if args.dtype == "auto" else getattr(torch, args.dtype))
    report.add({"work": "(device)"}, rates.figures)
    _give_back(device)
    bench = Bench(args, report, rates.ceiling)
    with ExitStack() as stack:
        if args.random_weights:
            args.model, args.random_weights = stack.enter_context(random_checkpoint(args.random_weights)), None
            args.option.append(("tokenizer", "demo"))
        bench.run("equal tokens", lambda: equal_tokens(bench, device))
        if not set(args.parts).isdisjoint(ON_ONE_ENGINE):
            with kept_going(report, "the engine"), open_session(args, report, bench.longest) as session:
                bench.run("one stream", lambda: one_stream(bench, session))
                bench.run("workload", lambda: workload(bench, session))
                bench.run("decode", lambda: decode(bench, session))
        _give_back(device)
        bench.run("start-up", lambda: start_up(bench))
    report.show()
    return 1 if "failed" in report.facts else 0


# ---- on small engines of their own


def equal_tokens(bench: Bench, device: torch.device) -> None:
    """Mixed requests to the bundled model in float32, in a pool so small that some are preempted: every mode, the same tokens."""
    rng = random.Random(0)
    params = [
        SamplingParams(
            temperature=0.5 * (i % 3), top_k=20 * (i % 2), top_p=0.9, seed=i, ignore_eos=True, max_tokens=20 + i % 13
        )
        for i in range(36)
    ]
    with LLM("demo", dtype="float32", device=str(device), max_model_len=256, num_kv_blocks=96, use_tqdm=False) as llm:
        shared = random_tokens(rng, 48, llm.engine.vocab_size)
        prompts = [
            shared * (i % 3 == 0) + random_tokens(rng, rng.randint(1, 120), llm.engine.vocab_size)
            for i in range(len(params))
        ]
        found: dict[Mode, list[list[int]]] = {}
        for mode in modes_of(llm):
            llm.reset_prefix_cache()
            with running_in(llm, mode):
                outputs = llm.generate(prompts, params, use_tqdm=False)
            found[mode] = [output.outputs[0].token_ids for output in outputs]
        preemptions = llm.engine.scheduler.num_preemptions
    _say_what_is_missing(bench, list(found))
    first, *others = found.values()
    differing = sum(any(tokens[i] != first[i] for tokens in others) for i in range(len(prompts)))
    figures = {"requests": float(len(prompts)), "modes": float(len(found)), "preemptions": float(preemptions)}
    bench.report.add({"work": "equal tokens"}, figures | {"differing": float(differing)})


def start_up(bench: Bench) -> None:
    """A fresh process. Kernels are compiled as far as the cache has them: after the other parts, all of them."""
    bench.report.warn("start-up: the weights' file is in the page cache")
    threads, options = len(os.sched_getaffinity(0)), engine_options(bench.args)
    settings = Settings(ENGINE, str(bench.args.model), [], 1, 0, 0.0, threads=threads, options=options)
    [figures] = run_peer(sys.executable, settings)["start"]
    bench.report.add({"work": "start-up"}, figures)


# ---- on one engine


def one_stream(bench: Bench, session: Session) -> None:
    """One request at a time: its first token, and the ones after it."""
    args, limit = bench.args, session.limit
    prompt_len, output_len = args.stream_len
    prefill = limit.workload_seconds(Workload([[0] * prompt_len], [1]), bench.ceiling)
    context = prompt_len + output_len // 2
    step = limit.seconds(StepWork(1, 1, context, context), bench.ceiling)
    mode = modes_of(session.llm)[0]
    case = {"work": "one stream", "mode": str(mode), "input_len": prompt_len, "output_len": output_len}
    for repetition in range(-WARM_UPS, args.repeat):
        work = Workload([session.tokens(prompt_len, repetition)], [output_len])
        with running_in(session.llm, mode):
            figures = stream_figures(session.run(work, "one stream", temperature=0.0))
        if repetition >= 0:
            shares = {"ttft_ms_share": 1000 * prefill / figures["ttft_ms"]}
            if "tpot_ms" in figures:
                shares["tpot_ms_share"] = 1000 * step / figures["tpot_ms"]
            bench.report.add(case, figures | shares)


def workload(bench: Bench, session: Session) -> None:
    """All requests at once."""
    args = bench.args
    sizes = args.num_seqs, tuple(args.input_len), tuple(args.output_len)
    work = random_workload(*sizes, session.vocab_size, 0)
    bench.report.facts |= {"prompt_tokens": sum(map(len, work.prompts)), "output_tokens": work.num_output_tokens}
    mode = modes_of(session.llm)[0]
    _say_what_is_missing(bench, [mode])
    with running_in(session.llm, mode):
        session.run(work.cut(WARM_UP_TOKENS), "warm-up")
        for _ in range(args.workload_repeat):
            run = session.run(work, str(mode))
            bench.report.add({"work": "workload", "mode": str(mode)}, _workload_figures(bench, session, work, run))
            if run.num_preemptions:
                text = f"{run.num_preemptions} preemptions in a run: the KV pool is small for this workload"
                bench.report.warn(text)


# ---- what several share


def _workload_figures(bench: Bench, session: Session, work: Workload, run: Run) -> Figures:
    least = session.limit.workload_seconds(work, bench.ceiling)
    in_turn = session.limit.workload_seconds(work, bench.ceiling, in_turn=True)
    return (
        {"output_tok_s": work.num_output_tokens / run.seconds, "output_tok_s_share": least / run.seconds}
        | {"in_turn_tok_s_share": in_turn / run.seconds}
        | latency_figures(run.requests)
        | step_figures(run.steps, session.limit, bench.ceiling)
    )


def _say_what_is_missing(bench: Bench, modes: Sequence[Mode]) -> None:
    if FASTEST not in modes:
        bench.report.warn("left out: CUDA graphs, which are not recorded here")


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gpu_engine", description=__doc__.split("\n")[0] if __doc__ else None)
    pair = {"type": positive_int, "nargs": 2, "metavar": ("LOW", "HIGH")}
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    parser.add_argument("--num-seqs", type=positive_int, default=NANO_VLLM[0], help="requests of the workload")
    parser.add_argument("--input-len", **pair, default=NANO_VLLM[1], help="tokens of a prompt")  # type: ignore[arg-type]
    parser.add_argument("--output-len", **pair, default=NANO_VLLM[2], help="tokens to generate")  # type: ignore[arg-type]
    parser.add_argument(
        "--stream-len", type=positive_int, nargs=2, metavar=("PROMPT", "NEW"), default=(1024, 129), help="of one stream"
    )
    parser.add_argument("--decode-len", type=positive_int, default=512, help="prompt tokens before decode steps")
    parser.add_argument("--decode-steps", type=positive_int, default=50, help="steps that are timed, and profiled")
    parser.add_argument("--repeat", type=positive_int, default=7, help="repetitions of one stream (default: 7)")
    parser.add_argument("--workload-repeat", type=positive_int, default=2, help="of the workload (default: 2)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON here")
    add_model_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
