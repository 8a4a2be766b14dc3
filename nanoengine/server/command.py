"""The command line of `nanoengine serve`: every option of the engine and of the server, with the help that their classes give."""

from __future__ import annotations

import argparse
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from nanoengine.arguments import byte_count, docstring
from nanoengine.builder import not_installed, option_types
from nanoengine.core.config import BYTES
from nanoengine.errors import InvalidConfig, MissingPackage
from nanoengine.server.config import ServerConfig

MODEL = (
    '"demo" (bundled), "smollm2" (once fetched), a local folder, a .gguf file, or a hub name such as "Qwen/Qwen3-0.6B"'
)

NO_OPTIONS = ("model", "options")
"""Fields of the engine's options that are none of the command line."""

SERVER_DEFAULTS = (
    "A server has defaults of its own for four: scheduling_policy is mixed, max_num_batched_tokens 512 (2048 on a GPU), "
    "long_prefill_token_threshold half of that, and min_priority 0."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the model and all options; those that are not given are left out of what it parses."""
    parser.add_argument("model", help=MODEL)
    parser.add_argument("-v", "--verbose", action="store_true", help="show how the model was loaded")
    server = parser.add_argument_group("server")
    engine = parser.add_argument_group("engine", SERVER_DEFAULTS)
    for group, kind in ((server, ServerConfig), *((engine, kind) for kind in option_types())):
        hints, helps = typing.get_type_hints(kind), _help(kind)
        for field in fields(kind):
            if field.name not in NO_OPTIONS:
                kind_of = byte_count if field.metadata == BYTES else hints[field.name]
                _add(group, field.name, kind_of, helps[field.name], field.default)


def configs(args: argparse.Namespace) -> tuple[dict[str, Any], ServerConfig]:
    """The options of the engine and of the server; raises InvalidConfig."""
    given = vars(args)
    engine = {field.name for kind in option_types() for field in fields(kind)} - set(NO_OPTIONS)
    server = {field.name: given[field.name] for field in fields(ServerConfig) if field.name in given}
    texts: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in server.items()}
    if "api_key" not in texts and (key := os.environ.get("NANOENGINE_API_KEY")) is not None:
        if not key:  # as of a secret that was not found: everybody would be served
            raise InvalidConfig("NANOENGINE_API_KEY is empty: give it a key, or unset it to serve everybody")
        texts["api_key"] = (key,)
    return {name: value for name, value in given.items() if name in engine}, ServerConfig(**texts)


def run(args: argparse.Namespace) -> None:
    """Serve what a command line asks for.

    Raises:
        MissingPackage: one that the server needs.
        InvalidConfig: an option cannot work.
    """
    options, config = configs(args)
    try:
        from nanoengine.server.serve import serve
    except ModuleNotFoundError as error:
        package, *folders = (error.name or "").split(".")
        if package == "nanoengine" and folders:
            raise not_installed(folders[0]) from error
        raise MissingPackage(f"the server needs {error.name}: pip install {error.name}") from error
    serve(args.model, options, config)


def _add(group: Any, name: str, hint: Any, text: str, default: Any) -> None:
    kind = next((kind for kind in typing.get_args(hint) if kind is not type(None)), hint)
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if default is not None and default is not MISSING:
        options["help"] += f" (default: {default})"
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["metavar"] = name.upper().rsplit("_", 1)[-1]
        options |= {"nargs": "+"} if typing.get_origin(kind) is tuple else {"type": kind}
    group.add_argument("--" + name.replace("_", "-"), **options)


def _help(kind: type) -> Mapping[str, str]:
    """What the docstring of a class says of each field, under "Args:"."""
    arguments = docstring(kind).partition("Args:\n")[2].partition("\nRaises:")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).strip() for name, text in entries}
