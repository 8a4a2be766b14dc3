"""Ranks: one process with all threads, a worker process with all, and a group of ranks that share them, turn by turn; and what a
gather costs.

TTFT and TPOT of one stream. A gather is measured between processes of their own, by the widths of the model: microseconds from
the call to the return, with nothing to compute in between. `gathers_share` is what those of a decode step are of its time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.drive import drive
from benchmarks.figures import latency_figures
from benchmarks.options import add_model_options, add_run_options, engine_options, positive_int
from benchmarks.report import ENGINE, Report
from benchmarks.session import checkpoint
from benchmarks.workload import Workload, random_tokens
from nanoengine import LLM
from nanoengine.models.model_config import ModelConfig
from nanoengine.parallel.communicator import SharedMemory
from nanoengine.parallel.shares import Shares
from nanoengine.worker.member import Member

GATHERS = 2000
PER_LAYER = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count: dict[str, Any] = {"type": positive_int, "metavar": "N"}
    parser.add_argument("--ranks", **count, default=2, help="processes of the group (default: 2)")
    parser.add_argument("--input-len", **count, default=256, help="tokens of the prompt (default: 256)")
    parser.add_argument("--output-len", **count, default=64, help="tokens of the answer (default: 64)")
    add_model_options(parser)
    add_run_options(parser, repeat=7)


def run(args: argparse.Namespace, report: Report) -> None:
    options = engine_options(args)
    group = f"{args.ranks} ranks"
    case = {"input_len": args.input_len, "output_len": args.output_len}
    with ExitStack() as stack:
        model = stack.enter_context(checkpoint(args, options, args.input_len + args.output_len))
        one = stack.enter_context(LLM(model, use_tqdm=False, **options))
        apart = stack.enter_context(LLM(model, use_tqdm=False, worker_process=True, **options))
        many = stack.enter_context(LLM(model, use_tqdm=False, tensor_parallel_size=args.ranks, **options))
        config, rng = one.built.models.model_config, random.Random(args.seed)
        report.facts |= {"parameters": config.num_parameters(), "threads": torch.get_num_threads()}
        for repetition in range(-1, args.repeat):  # -1 is the warm-up
            workload = Workload([random_tokens(rng, args.input_len, one.engine.vocab_size)], [args.output_len])
            for name, llm in ((ENGINE, one), ("a worker", apart), (group, many)):
                llm.reset_prefix_cache()
                figures = latency_figures(drive(llm.engine, workload, lambda _: None).requests)
                if repetition >= 0:
                    report.add(case, figures, name)
    found = report.find(case, group)
    assert found is not None
    a_step = median(found.values["tpot_ms"])
    for rows in (1, args.input_len):
        all_widths = widths_of(config, args.ranks)
        if rows > 1:
            del all_widths["logits"]  # which are those of few rows, whatever a step computes
        costs = {name: gather_microseconds(widths, rows) for name, widths in all_widths.items()}
        all_of_them = config.num_layers * sum(costs[name] for name in ("heads", "hidden", "gated", "hidden"))
        figures = {f"{name}_us": cost for name, cost in costs.items()} | {"of_all_layers_ms": all_of_them / 1000}
        if rows == 1:
            figures["gathers_share"] = (all_of_them + costs["logits"]) / 1000 / a_step
        report.add({"rows": rows}, figures, group)


def widths_of(config: ModelConfig, ranks: int) -> dict[str, list[int]]:
    """Bytes of a row that each rank gives to each gather."""
    shares = Shares(ranks, config.num_heads, config.num_kv_heads, config.head_dim)
    ranges = {
        "heads": shares.columns(shares.heads),
        "hidden": shares.outputs(config.hidden_size),
        "gated": shares.outputs(config.intermediate_size),
    }
    widths = {name: [2 * len(own) for own in each] for name, each in ranges.items()}
    return widths | {"logits": [4 * len(own) for own in shares.outputs(config.vocab_size)]}


def gather_microseconds(widths: list[int], rows: int) -> float:
    """The median of many, in processes that do nothing else."""
    context, memory = multiprocessing.get_context("fork"), os.memfd_create("gather")
    sent = context.Queue()
    members = [Member(rank, len(widths), memory, 30.0) for rank in range(len(widths))]
    processes = [context.Process(target=_gather, args=(member, widths, rows, sent)) for member in members]
    for process in processes:
        process.start()
    os.close(memory)
    try:
        return median(sent.get(timeout=100) for _ in processes)
    finally:
        for process in processes:
            process.join(1)
            process.kill()


def _gather(member: Member, widths: list[int], rows: int, sent: Any) -> None:
    torch.set_num_threads(1)  # those of the process that was forked are not here
    rank = SharedMemory.of_member(member, max(widths))
    part = torch.zeros(rows, widths[member.rank], dtype=torch.uint8)
    times = []
    for _ in range(GATHERS if rows == 1 else GATHERS // 20):
        start = perf_counter()
        rank.gather(part, widths)
        times.append(1e6 * (perf_counter() - start))
    rank.check()
    sent.put(median(times))
