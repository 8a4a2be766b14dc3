"""The benchmark: how fast this engine is here, beside the limit of the machine and, with --vs, beside transformers.

python bench.py throughput      all requests at once: output tokens per second
python bench.py latency         one stream: TTFT, TPOT, ITL over prompt and output lengths
python bench.py serve           requests that arrive on their own: latencies and goodput over load
python bench.py http            what a server costs: the same work offline, whole over HTTP and streamed
python bench.py load            a server, over HTTP: goodput, latencies and refusals below, at and beyond its capacity
python bench.py soak            a server for half an hour, with whatever clients do to it: what was lost, wrong or leaked
python bench.py attacks         what rude clients cost others: the longest /health and a third client's chat, attack by attack
python bench.py interference    long prompts beside running streams: what becomes of the streams, under each policy
python bench.py prefix          a shared system prompt, and chats: with the prefix cache and without
python bench.py scheduler       no model: microseconds of scheduling per token
python bench.py startup         process start to the first token, beside the floor: import torch, read the weights; peak memory
python bench.py ranks           one process beside ranks that share a model, turn by turn, and what their gathers cost
python bench.py speculation     guessing ahead, turn by turn with none, on five kinds of text
python bench.py structured      a JSON schema: time per token with a grammar, forced tokens and masks, beside the same without
python bench.py determinism     the same requests in drawn ways: how many answers differ, in a token or in any bit
python bench.py quality         what quantization loses: distributions of each format beside those of float32
python bench.py workloads       five fixed workloads on which other engines were measured too (benchmarks/cpu.md)
python bench.py profile         one prefill and one decode step, operation by operation
python bench.py compare A B     two saved runs, side by side

Each takes --help. All but http, load, soak, attacks and the last two of that list share:
  --model demo | FOLDER | NAME, or --random-weights qwen3-0.6b: real shapes, nothing downloaded
  --repeat N, --seed N, --save FILE.json, --plot FILE.png
All but compare: --cpu NAME, as on another CPU: x86-64-v3 (AVX2), x86-64-v4 (AVX-512), or any name that -march takes

Prompts are random token ids, sampling is at temperature 0.6, ends of text are ignored. A warm-up goes first; figures are
medians over repetitions, with half their range. --save keeps them as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from datetime import date
from pathlib import Path
from types import ModuleType

from benchmarks.machine import BUSY, OtherLoad, machine_facts
from benchmarks.options import BadOption, check_folder
from benchmarks.plots import check_plot, plot
from benchmarks.report import Report
from benchmarks.target import add_cpu_option, hold_to_cpu
from nanoengine.errors import NanoEngineError

MODES = (
    *("throughput", "latency", "serve", "interference", "prefix", "ranks"),
    *("http", "load", "soak", "attacks"),
    *("scheduler", "startup", "speculation", "structured", "determinism", "quality", "workloads", "profile", "compare"),
)


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    mode, *rest = arguments
    try:
        if mode not in MODES:
            raise BadOption(f"{mode!r} is no mode: the modes are {', '.join(MODES)}")
        hold_to_cpu(rest)
        module = importlib.import_module(f"benchmarks.{mode}")  # each imports what it needs: some need no torch
        parser = argparse.ArgumentParser(
            f"bench.py {mode}",
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # hold_to_cpu knows whole names only
        )
        module.add_arguments(parser)
        if mode != "compare":
            add_cpu_option(parser)
        args = parser.parse_args(rest)
        if mode == "compare":
            module.show(args.before, args.after)
            return 0
        return measure(mode, module, args)
    except NanoEngineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(("nanoengine", "benchmarks")):
            raise
        print(f"bench.py {mode} needs {error.name}: pip install 'nanoengine[bench]'", file=sys.stderr)
        return 2


def measure(mode: str, module: ModuleType, args: argparse.Namespace) -> int:
    """Run one mode and show what it found, even if it is interrupted."""
    for option in ("save", "plot"):
        check_folder(f"--{option}", getattr(args, option))
    if args.plot:
        check_plot(args.plot)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    report = Report(mode, {"date": date.today().isoformat(), **machine_facts(), "arguments": settings})
    others = OtherLoad()
    found_faults = False  # some modes check as they measure
    try:
        found_faults = bool(module.run(args, report))
    except KeyboardInterrupt as interrupt:
        report.interrupted = str(interrupt) or "between two runs"
    cores = others.cores()
    if cores is not None and cores > BUSY:
        report.warn(f"other processes used {cores:.2f} cores meanwhile: the figures are in doubt")
    report.show()
    if args.save and report.rows:
        report.save(args.save)
    if args.plot and report.rows:
        plot(report, args.plot)
    return 130 if report.interrupted else int(found_faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
