"""Start-up: seconds from the start of a fresh process to its first token, and the most memory it has held by then.

`import_s`, `ready_s` and `first_token_s` all count from the start of the process. Files are in the page cache, as after
a first start.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

from benchmarks.options import add_model_options, add_run_options, add_vs_option, engine_options, positive_int
from benchmarks.report import ENGINE, Report
from benchmarks.session import checkpoint
from nanoengine.errors import NanoEngineError
from nanoengine.models.loader import find_model


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
        files = find_model(model).glob("*.safetensors")
        report.facts["checkpoint_mb"] = sum(file.stat().st_size for file in files) / 1e6
        engines = [ENGINE, *([args.vs] if args.vs else [])]
        for repetition in tqdm(
            range(-1, args.repeat), desc="starts", leave=False, disable=None
        ):  # -1 fills the page cache
            for engine in engines:
                figures = first_token(engine, model, args.input_len, options)
                if repetition >= 0:
                    report.add({"input_len": args.input_len}, figures, engine)


def first_token(engine: str, model: str, input_len: int, options: dict[str, object]) -> dict[str, float]:
    """Start a process, let it make one token, and return what it says about that."""
    command = [sys.executable, "-m", "benchmarks.first_token", engine, model, str(input_len), json.dumps(options)]
    root = Path(__file__).parent.parent
    child = subprocess.run([*command, repr(time.monotonic())], cwd=root, capture_output=True, text=True, check=False)
    if child.returncode:
        raise ChildFailed(f"{engine} has not come to a first token: {child.stderr.strip().splitlines()[-1:]}")
    figures: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return figures
