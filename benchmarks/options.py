"""Command-line options that several modes share, and their checks."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Any

from benchmarks.random_weights import SHAPES
from nanoengine.errors import NanoEngineError


class BadOption(NanoEngineError, ValueError):
    """An option of the benchmark cannot work: the message says which, and its limit."""


def positive_int(text: str) -> int:
    return _positive(text, int, "a whole number")


def positive_float(text: str) -> float:
    return _positive(text, float, "a number")


def _positive(text: str, kind: type, noun: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be {noun} above 0")
    return value


def engine_option(text: str) -> tuple[str, Any]:
    """`name=value`: numbers, True, False and None as in Python, anything else is a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def add_engine_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup, whose: str) -> None:
    kind = {"type": engine_option, "metavar": "NAME=VALUE"}
    parser.add_argument("--option", action="append", default=[], help=whose, **kind)  # type: ignore[arg-type]


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and engine")
    model = group.add_mutually_exclusive_group()
    model.add_argument("--model", default="demo", help="'demo' (bundled), a folder, or a hub name (default: demo)")
    model.add_argument(
        "--random-weights", choices=SHAPES, help="random weights of this shape, made in a temporary folder"
    )
    group.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 or auto (default)")
    group.add_argument("--device", default="auto", help="cpu, cuda or auto (default)")
    group.add_argument("--model-impl", default="auto", help="nanoengine, transformers or auto (default)")
    add_engine_option(group, "any field of EngineConfig")


def add_run_options(parser: argparse.ArgumentParser, *, repeat: int) -> None:
    group = parser.add_argument_group("run")
    group.add_argument(
        "--repeat", type=positive_int, default=repeat, help="repetitions after a warm-up (default: %(default)s)"
    )
    group.add_argument("--seed", type=int, default=0, help="of the workload (default: 0)")
    group.add_argument("--save", type=Path, metavar="FILE", help="write the JSON here too")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    return {"dtype": args.dtype, "device": args.device, "model_impl": args.model_impl, **dict(args.option)}


def check_range(name: str, bounds: tuple[int, int]) -> tuple[int, int]:
    low, high = bounds
    if low > high:
        raise BadOption(f"{name} is {low} {high}: the first must not be above the second")
    return low, high


def check_folder(name: str, path: Path | None) -> None:
    if path is not None and not path.parent.is_dir():
        raise BadOption(f"{name} {path}: there is no folder {path.parent}")


def check_lengths(longest: int, limit: int, reason: str) -> None:
    if longest > limit:
        raise BadOption(
            f"the longest request would have {longest} tokens, prompt and output, but {reason} is {limit}: "
            "choose shorter ones"
        )
