"""Options of the engine on a command line: an argument for each field of their classes, with the help of their docstrings."""

from __future__ import annotations

import argparse
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from nanoengine.builder import option_types
from nanoengine.plugins import PluginOptions, plugin_errors
from nanoengine.serve.arguments import Parser, byte_count, docstring

NO_OPTIONS = ("model", "options")
"""Fields of the engine's options that are none of the command line."""


def early_values(arguments: Sequence[str], *names: str) -> argparse.Namespace:
    """Arguments that add others, read before the whole line can be parsed: each is a list of values, or None."""
    parser = Parser(prog=" ".join(["nanoengine", *arguments[:1]]), add_help=False)
    for name in names:
        parser.add_argument(name, nargs="+")
    return parser.parse_known_args(arguments)[0]


def add_engine_options(group: Any, plugins: PluginOptions | None = None, but: Collection[str] = ()) -> None:
    """Add all options of the engine, and of plugins, but those of some names."""
    for kind in option_types(plugins):
        add_fields(group, kind, (*NO_OPTIONS, *but))


def add_fields(group: Any, kind: type, but: Collection[str] = ()) -> None:
    """Add an argument for each field of a dataclass; an argument that is not typed is no attribute of the namespace.

    Raises:
        InvalidConfig: a plugin's field has the name of another argument, or a type that no argument can have.
    """
    hints, helps = typing.get_type_hints(kind), _help(kind)
    for field in fields(kind):
        if field.name not in but:
            hint = byte_count if field.metadata.get("unit") == "bytes" else hints[field.name]
            with plugin_errors(f"{kind.__qualname__} of {kind.__module__}"):
                _add(group, field.name, hint, helps.get(field.name, ""), field.default)


def engine_values(args: argparse.Namespace, but: Collection[str] = ()) -> dict[str, Any]:
    """The options of the engine that were typed."""
    types = option_types(PluginOptions(plugins=getattr(args, "plugins", None)))
    names = {field.name for kind in types for field in fields(kind)}.difference(NO_OPTIONS, but)
    return {name: value for name, value in vars(args).items() if name in names}


def _add(group: Any, name: str, hint: Any, text: str, default: Any) -> None:
    kind = next((kind for kind in typing.get_args(hint) if kind is not type(None)), hint)
    options: dict[str, Any] = {"dest": name, "help": text.replace("%", "%%"), "default": argparse.SUPPRESS}
    if default is not None and default is not MISSING:
        options["help"] += f" (default: {default})"
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["metavar"] = name.upper().rsplit("_", 1)[-1]
        options |= {"nargs": "+"} if typing.get_origin(kind) is tuple else {"type": kind}
    group.add_argument("--" + name.replace("_", "-"), **options)


def _help(kind: type) -> Mapping[str, str]:
    """The texts of the fields of a class, from "Args:" of its docstring."""
    arguments = docstring(kind).partition("Args:\n")[2].partition("\nRaises:")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).strip() for name, text in entries}
