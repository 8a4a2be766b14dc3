"""Options of sampling on a command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nanoengine.errors import InvalidSamplingParams

SAMPLING = {
    "temperature": (float, "0 is greedy"),
    "top_k": (int, "0 keeps all tokens"),
    "top_p": (float, "1 keeps all tokens"),
    "min_p": (float, "0 keeps all tokens"),
    "presence_penalty": (float, "makes tokens that the answer has already less likely; 0 does nothing"),
    "frequency_penalty": (float, "the same, times how often the answer has them; 0 does nothing"),
    "repetition_penalty": (float, "the same for tokens of prompt and answer, as a factor; 1 does nothing"),
}
"""Options of sampling, and their help. The defaults are those of the model."""


def add_sampling_options(command: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """Add all but those of `generate` alone. `max_tokens`: None: as many as the model has room for."""
    text = f"most new tokens (default: {max_tokens or 'as there is room'})"
    command.add_argument("--max-tokens", type=int, default=max_tokens or argparse.SUPPRESS, help=text)
    command.add_argument("--seed", type=int, help="makes sampling repeatable")
    command.add_argument("--stop", action="append", default=[], help="a string that ends the text; may be repeated")
    for name, (kind, words) in SAMPLING.items():
        command.add_argument("--" + name.replace("_", "-"), type=kind, default=argparse.SUPPRESS, help=words)


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """The parameters of sampling that were typed, checked before a model is loaded; raises InvalidSamplingParams."""
    from nanoengine import SamplingParams  # not with this module: other commands work where that folder was deleted

    names = (*SAMPLING, "seed", "max_tokens", "stop", "n")
    values = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    if (shape := _structured_outputs(args)) is not None:
        values["structured_outputs"] = shape
    SamplingParams(**values)
    return values


def _structured_outputs(args: argparse.Namespace) -> dict[str, Any] | None:
    """The structured outputs that the options of `generate` ask for."""
    for name, field in (("json_schema", "json"), ("regex", "regex"), ("choice", "choice")):
        if (value := getattr(args, name, None)) is not None:
            return {field: _schema_text(value) if name == "json_schema" else value}
    return None


def _schema_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSamplingParams(f"--json-schema {path} cannot be read: {error}") from error
