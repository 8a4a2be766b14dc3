"""The options of `nanoengine serve`, on its command line or in a file: all of the engine and of the server, with the help that
their classes give.
"""

from __future__ import annotations

import argparse
import logging
import os
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from nanoengine.builder import not_installed
from nanoengine.core.model_config import read_file
from nanoengine.errors import InvalidConfig, MissingPackage, NanoEngineError, UnknownOption, did_you_mean, shown
from nanoengine.log import show_log
from nanoengine.plugins import PluginOptions
from nanoengine.serve.arguments import byte_count
from nanoengine.serve.engine_options import add_engine_options, add_fields, early_values, engine_values
from nanoengine.serve.server.config import ServerConfig

logger = logging.getLogger("nanoengine")

MODEL = (
    '"demo" (bundled), "smollm2" (once fetched), a local folder, a .gguf file, or a hub name such as "Qwen/Qwen3-0.6B"'
)

CONFIG = "a TOML file of options, such as max-waiting = 64; the command line comes first"
VERBOSE = "show how the model was loaded: --log-level debug"

MAX_CONFIG_BYTES = 32 << 10
"""Of a file of options: tomllib takes the third power of the length of a key with many dots, here 4 s."""

TOML = {bool: (bool,), int: (int,), float: (float, int), byte_count: (int, str)}
"""Types that a value may have in a file, for each kind of option that is no string."""

SERVER_DEFAULTS = (
    "A server has defaults of its own for four: scheduling_policy is mixed, max_num_batched_tokens 512 (2048 on a GPU), "
    "long_prefill_token_threshold half of that, and min_priority 0."
)


def named_plugins(arguments: Sequence[str]) -> PluginOptions:
    """The plugins that a command line names, or else its file of options: theirs must be known before it is parsed."""
    found = early_values(arguments, "--plugins", "--config")
    names = found.plugins or (read_options(found.config[0]).get("plugins") if found.config else None)
    return PluginOptions(plugins=(names,) if isinstance(names, str) else names)


def add_arguments(parser: argparse.ArgumentParser, plugins: PluginOptions | None = None) -> None:
    """Give a parser the model and all options; those that are not given are left out of what it parses."""
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument("model", nargs="?", help=MODEL)
    parser.add_argument("--config", metavar="FILE", action=ConfigFile, help=CONFIG)
    parser.add_argument("-v", "--verbose", dest="log_level", action="store_const", const="debug", help=VERBOSE)
    add_fields(parser.add_argument_group("server"), ServerConfig)
    add_engine_options(parser.add_argument_group("engine", SERVER_DEFAULTS), plugins)


def configs(args: argparse.Namespace) -> tuple[dict[str, Any], ServerConfig]:
    """The options of the engine and of the server; raises InvalidConfig."""
    given = vars(args)
    server = {field.name: given[field.name] for field in fields(ServerConfig) if field.name in given}
    texts: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in server.items()}
    if "api_key" not in texts and (key := os.environ.get("NANOENGINE_API_KEY")) is not None:
        if not (key := key.strip()):  # as of a secret that was not found: everybody would be served
            raise InvalidConfig("NANOENGINE_API_KEY is empty: give it a key, or unset it to serve everybody")
        texts["api_key"] = (key,)
    return engine_values(args), ServerConfig(**texts)


def run(args: argparse.Namespace) -> None:
    """Serve what a command line asks for.

    Raises:
        MissingPackage: one that the server needs.
        InvalidConfig: an option cannot work.
        SystemExit: an error was told as JSON.
    """
    if not hasattr(args, "model"):
        args.parser.error("the following arguments are required: model")
    options, config = configs(args)
    show_log(config.log_level, config.log_format)
    try:
        from nanoengine.serve.server.serve import serve
    except ModuleNotFoundError as error:
        package, *folders = (error.name or "").split(".")
        if package == "nanoengine" and folders:
            raise not_installed(folders[-1]) from error
        raise MissingPackage(f"the server needs {error.name}: pip install {error.name}") from error
    try:
        serve(args.model, options, config)
    except Exception as error:
        if config.log_format == "text":
            raise
        logger.critical("%s: %s", type(error).__name__, error, exc_info=not isinstance(error, NanoEngineError))
        raise SystemExit(1) from error


class ConfigFile(argparse.Action):
    """Takes from a TOML file what the command line does not say."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _: Any = None
    ) -> None:
        table = read_options(values)
        actions = {action.dest: action for action in parser._actions if action.dest not in ("help", self.dest)}
        for key, value in table.items():
            name = key.replace("-", "_")
            if (action := actions.get(name)) is None:
                raise UnknownOption(f"{values}: there is no option {shown(key)}{did_you_mean(name, actions)}")
            types = TOML.get(bool if action.nargs == 0 else action.type, (str,))
            texts = value if action.nargs == "+" and isinstance(value, list) else [value]
            for text in texts:
                if type(text) not in types:
                    words = " or ".join(kind.__name__ for kind in types)
                    raise InvalidConfig(f"{values}: {key} must be of the type {words}, not {type(text).__name__}")
            try:
                own = [text if bool in types else parser._get_value(action, str(text)) for text in texts]
            except argparse.ArgumentError as error:
                raise InvalidConfig(f"{values}: {error}") from error
            if not hasattr(namespace, name):
                setattr(namespace, name, own if action.nargs == "+" else own[0])


def read_options(path: str) -> dict[str, Any]:
    """The table in a TOML file; raises InvalidConfig if it cannot be read."""
    try:
        return tomllib.loads(read_file(Path(path), MAX_CONFIG_BYTES).decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidConfig(f"config is {shown(path)}, which cannot be read: {error}") from error
