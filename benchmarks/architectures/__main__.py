"""Judge every text-generation architecture of the installed transformers.

    python -m benchmarks.architectures [--only NAME ...] [--model-impl auto] [--write]

Prints a line for each. `--write` puts the table into docs/models.md, and the outcomes into a file that the tests read.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from benchmarks.architectures.bounded import judge_architecture
from benchmarks.architectures.checkpoints import names
from benchmarks.architectures.report import totals, write_docs, write_expected


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these architectures alone")
    parser.add_argument("--model-impl", help="the engine's option of that name")
    parser.add_argument("--write", action="store_true", help="write docs/models.md and the outcomes that tests expect")
    args = parser.parse_args(arguments)
    if args.write and (args.only or args.model_impl):
        parser.error("--write needs all architectures, as the engine computes them by default")
    torch.set_num_threads(1)
    options = {"model_impl": args.model_impl} if args.model_impl else {}
    outcomes = {}
    every = names()
    for name in args.only or every:
        start = time.perf_counter()
        outcomes[name] = judge_architecture(name, **options)
        print(f"{name:<48} {time.perf_counter() - start:5.1f} s  {outcomes[name]}", flush=True)
    print(totals(outcomes))
    if args.write:
        write_docs(outcomes)
        write_expected(outcomes)


if __name__ == "__main__":
    main(sys.argv[1:])
