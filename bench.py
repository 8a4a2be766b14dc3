"""The benchmark: how fast this engine is here, beside the limit of the machine. Each mode takes --help.

python bench.py workloads       a table of fixed workloads, or --own; --beside, --grammar and --adapters: in other ways too
python bench.py interference    long prompts beside running streams: what becomes of the streams, under each policy
python bench.py speculation     guessing ahead, turn by turn with none, on five kinds of text
python bench.py scheduler       no model: microseconds of scheduling per token
python bench.py determinism     the same requests in drawn ways: how many answers differ, in a token or in any bit
python bench.py quality         what quantization loses: distributions of each format beside those of float32
python bench.py http            what a server costs: the same work offline, whole over HTTP and streamed
python bench.py soak            a server for half an hour, with whatever clients do to it: what was lost, wrong or leaked
python bench.py attacks         what rude clients cost others: the longest /health and a third client's chat, attack by attack

Other engines on the same workloads, and how long they take to start: python -m benchmarks.peers

Modes with a model take --model demo | FOLDER | NAME; all but quality, http, soak and attacks also --random-weights qwen3-0.6b:
real shapes, nothing downloaded. All take --save FILE.json, and --cpu NAME: as on another CPU, x86-64-v3 (AVX2) or x86-64-v4
(AVX-512). Prompts are random token ids, ends of text are ignored, and a warm-up goes first.
Figures are medians over --repeat N repetitions, with half their range.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from datetime import date
from pathlib import Path
from types import ModuleType

try:
    from benchmarks.machine import BUSY, OtherLoad, machine_facts
    from benchmarks.options import BadOption, check_folder
    from benchmarks.report import Report
    from benchmarks.target import add_cpu_option, hold_to_cpu
    from nanoengine.errors import NanoEngineError
except ModuleNotFoundError as missing:
    sys.exit(f"bench.py needs {missing.name}: pip install '.[bench]'")

MODES = (
    *("workloads", "interference", "speculation", "scheduler", "determinism", "quality"),
    *("http", "soak", "attacks"),
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
        add_cpu_option(parser)
        return measure(mode, module, parser.parse_args(rest))
    except NanoEngineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(("nanoengine", "benchmarks")):
            raise
        print(f"bench.py {mode} needs {error.name}: pip install '.[bench]'", file=sys.stderr)
        return 2


def measure(mode: str, module: ModuleType, args: argparse.Namespace) -> int:
    """Run one mode and show what it found, even if it is interrupted."""
    check_folder("--save", args.save)
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
    return 130 if report.interrupted else int(found_faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
