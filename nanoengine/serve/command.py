"""The options of `nanoengine serve`, on its command line or in a file: all of the engine and of the server, with the help that
their classes give.
"""

from __future__ import annotations

import argparse
import logging
import os
import tomllib
from collections.abc import Mapping, Sequence
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
from nanoengine.serve.front.config import FrontConfig
from nanoengine.serve.server.config import ServerConfig

logger = logging.getLogger("nanoengine")

MODEL = (
    '"demo" (bundled), "smollm2" (once fetched), a local folder, a .gguf file, or a hub name such as "Qwen/Qwen3-0.6B"; '
    "several are loaded when they are requested"
)

CONFIG = "a TOML file of options, such as max-waiting = 64; the command line comes first"
VERBOSE = "show how the model was loaded: --log-level debug"

MAX_CONFIG_BYTES = 32 << 10
"""The largest file of options, in bytes: tomllib takes the third power of the length of a key with many dots, here 4 s."""

TOML = {bool: (bool,), int: (int,), float: (float, int), byte_count: (int, str)}
"""Types that a value may have in a file, for each kind of option that is no string."""

SERVER_DEFAULTS = (
    "A server has other defaults for four: scheduling_policy is mixed, max_num_batched_tokens 512 (2048 on a GPU), "
    "long_prefill_token_threshold half of that, and min_priority 0."
)


def named_plugins(arguments: Sequence[str]) -> PluginOptions:
    """The plugins that a command line names, or else its file of options: theirs must be known before it is parsed."""
    early = early_values(arguments, "--plugins", "--config")
    names = early.plugins or (read_options(early.config[0]).get("plugins") if early.config else None)
    return PluginOptions(plugins=(names,) if isinstance(names, str) else names)


def add_arguments(parser: argparse.ArgumentParser, plugins: PluginOptions | None = None) -> None:
    """Give a parser the model and all options; those that are not set are left out of what it parses."""
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument("model", nargs="*", help=MODEL)
    parser.add_argument("--config", metavar="FILE", action=ConfigFile, help=CONFIG)
    parser.add_argument("-v", "--verbose", dest="log_level", action="store_const", const="debug", help=VERBOSE)
    add_fields(parser.add_argument_group("server"), ServerConfig, ("front_socket",))
    add_fields(parser.add_argument_group("several models"), FrontConfig)
    add_engine_options(parser.add_argument_group("engine", SERVER_DEFAULTS), plugins)


def configs(args: argparse.Namespace) -> tuple[dict[str, Any], ServerConfig]:
    """The options of the engine and of the server; raises InvalidConfig."""
    texts = _values_of(ServerConfig, args)
    if "api_key" not in texts and (key := os.environ.get("NANOENGINE_API_KEY")) is not None:
        if not (key := key.strip()):  # as of a secret that does not exist: everybody would be served
            raise InvalidConfig("NANOENGINE_API_KEY is empty: give it a key, or unset it to serve everybody")
        texts["api_key"] = (key,)
    return engine_values(args), ServerConfig(**texts)


def _values_of(kind: type, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a class of options that a command line has."""
    values = {field.name: value for field in fields(kind) if (value := getattr(args, field.name, None)) is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def run(args: argparse.Namespace) -> None:
    """Serve what a command line asks for.

    Raises:
        MissingPackage: one that the server needs.
        InvalidConfig: an option cannot work.
        SystemExit: an error was logged as JSON.
    """
    names, tables = getattr(args, "model", []), getattr(args, "models", {})
    several = _values_of(FrontConfig, args)
    is_alone = len(names) == 1 and not tables and "models_dir" not in several
    if not (names or tables or "models_dir" in several):
        args.parser.error("the following arguments are required: model")
    if is_alone and several:
        raise InvalidConfig(f"{min(several)} is for several models, and one is named: leave it out")
    options, config = configs(args)
    if not is_alone and config.served_model_name is not None:
        raise InvalidConfig("served_model_name is for one model: name several by the tables [models.NAME] of --config")
    show_log(config.log_level, config.log_format)
    try:
        if is_alone:
            from nanoengine.serve.server.serve import serve
        else:
            from nanoengine.serve.front.run import serve_several
    except ModuleNotFoundError as error:
        package, *folders = (error.name or "").split(".")
        if package == "nanoengine" and folders:
            raise not_installed(folders[-1]) from error
        raise MissingPackage(f"the server needs {error.name}: pip install {error.name}") from error
    try:
        if is_alone:
            serve(names[0], options, config)
        else:
            serve_several(names, tables, options, config, FrontConfig(**several))
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
        models = table.pop("models", {})
        if not isinstance(models, dict) or not all(isinstance(one, dict) for one in models.values()):
            raise InvalidConfig(f"{values}: models must be tables [models.NAME]")
        for name, value in _checked(values, table, parser).items():
            if not hasattr(namespace, name):
                setattr(namespace, name, value)
        if models:
            namespace.models = {
                name: _of_model(f"{values}: [models.{name}]", one, parser) for name, one in models.items()
            }


def _of_model(where: str, table: Mapping[str, Any], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The options of one model: its engine's, and `model`. Raises as `_checked`, and for an option of the server."""
    values = _checked(where, table, parser)
    if wrong := {field.name for kind in (ServerConfig, FrontConfig) for field in fields(kind)} & values.keys():
        raise InvalidConfig(f"{where}: {min(wrong)} is an option of the server, not of one model")
    if names := values.pop("model", None):
        values["model"] = names[0]
    return values


def _checked(where: str, table: Mapping[str, Any], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The values of a table as the command line has them; raises UnknownOption and InvalidConfig, which begin with `where`."""
    actions = {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if (action := actions.get(name)) is None:
            raise UnknownOption(f"{where}: there is no option {shown(key)}{did_you_mean(name, actions)}")
        types, is_list = TOML.get(bool if action.nargs == 0 else action.type, (str,)), action.nargs in ("+", "*")
        texts = value if is_list and isinstance(value, list) else [value]
        for text in texts:
            if type(text) not in types:
                words = " or ".join(kind.__name__ for kind in types)
                raise InvalidConfig(f"{where}: {key} must be of the type {words}, not {type(text).__name__}")
        try:
            converted = [text if bool in types else parser._get_value(action, str(text)) for text in texts]
        except argparse.ArgumentError as error:
            raise InvalidConfig(f"{where}: {error}") from error
        values[name] = converted if is_list else converted[0]
    return values


def read_options(path: str) -> dict[str, Any]:
    """The table in a TOML file; raises InvalidConfig if it cannot be read."""
    try:
        return tomllib.loads(read_file(Path(path), MAX_CONFIG_BYTES).decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidConfig(f"config is {shown(path)}, which cannot be read: {error}") from error
