"""Start-up: seconds from the start of a fresh process to its first token, and its CPU seconds and most memory by then.

`import_s`, `ready_s` and `first_token_s` all count from the start of the process. Files are in the page cache, as after
a first start. Beside it stands the floor, in the same sitting: a process that imports torch and reads the weight files once, and
does nothing with them. `times_floor` is `first_token_s` over that.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.first_token import weight_files
from benchmarks.options import add_model_options, add_run_options, add_vs_option, engine_options, positive_int
from benchmarks.progress import bar
from benchmarks.report import ENGINE, Report
from benchmarks.session import checkpoint
from nanoengine.errors import NanoEngineError
from nanoengine.models.names import find_model

FLOOR = "floor"
"""What any engine of torch's has to do; benchmarks.first_token knows it by this name."""


class ChildFailed(NanoEngineError):
    """The process that was to be measured ended without a first token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-len", type=positive_int, default=128, help="tokens of the prompt (default: 128)")
    add_vs_option(parser)
    add_model_options(parser)
    add_run_options(parser, repeat=5)


def run(args: argparse.Namespace, report: Report) -> None:
    options = engine_options(args)
    with checkpoint(args, options, args.input_len + 1) as model:
        path = find_model(model)
        report.facts["checkpoint_mb"] = sum(file.stat().st_size for file in weight_files(path)) / 1e6
        engines = [ENGINE, *([args.vs] if args.vs else [])]
        for engine in engines:
            first_token(engine, model, args.input_len, options)  # fills the page cache
        for _ in bar("starts", range(args.repeat)):
            floor = first_token(FLOOR, str(path), args.input_len, options)
            report.add({}, floor, FLOOR)
            for engine in engines:
                figures = first_token(engine, model, args.input_len, options)
                times_floor = figures["first_token_s"] / floor["weights_read_s"]
                report.add({"input_len": args.input_len}, figures | {"times_floor": times_floor}, engine)


def first_token(engine: str, model: str, input_len: int, options: dict[str, object]) -> dict[str, float]:
    """Start a process, let it make one token, and return what it says about that."""
    command = [sys.executable, "-m", "benchmarks.first_token", engine, model, str(input_len), json.dumps(options)]
    root = Path(__file__).parent.parent
    child = subprocess.run([*command, repr(time.monotonic())], cwd=root, capture_output=True, text=True, check=False)
    if child.returncode:
        raise ChildFailed(f"{engine} has not come to a first token: {child.stderr.strip().splitlines()[-1:]}")
    figures: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return figures
