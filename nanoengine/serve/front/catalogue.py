"""Which models a server can load: those of the command line, of a folder, and of the tables `[models.NAME]` of its file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoengine.builder import read_config
from nanoengine.core.config import EngineConfig
from nanoengine.errors import InvalidConfig, shown
from nanoengine.models.names import first_parts
from nanoengine.serve.server.served_model import short_name

MAX_MODELS = 1024
MAX_FOLDERS = 1 << 14
"""Bounds of a search below --models-dir."""

MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class Source:
    """A model that can be loaded.

    Args:
        name: for clients.
        model: see `LLM`.
        options: of its engine.
        config: the same, checked.
    """

    name: str
    model: str
    options: Mapping[str, Any]
    config: EngineConfig

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that are loaded with it."""
        modules = self.options.get("lora_modules") or ()
        return [str(module).partition("=")[0] for module in modules]


def catalogue(
    models: Sequence[str], folder: str | None, tables: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]
) -> dict[str, Source]:
    """The models of a server, by their names.

    Args:
        models: of the command line.
        folder: --models-dir.
        tables: options by the name of a model; `model` in it says which it is, where it is no other's name here.
        options: of the engines of all models.

    Raises:
        InvalidConfig: two of one name; no model at all; too many.
        UnknownOption: of an engine.
    """
    named = [(short_name(model), model) for model in models]
    if folder is not None:
        named += [(short_name(str(path)), str(path)) for path in _models_below(Path(folder))]
    known = {name for name, _ in named}
    named += [
        (name, str(table.get("model", name))) for name, table in tables.items() if "model" in table or name not in known
    ]
    if not 0 < len(named) <= MAX_MODELS:
        where = f"{shown(folder)} has no model" if folder else "no model is named"
        raise InvalidConfig(f"{len(named)} models: a server has at most {MAX_MODELS}" if named else where)
    sources: list[Source] = []
    for name, model in named:
        if not (name and name.isprintable() and name == name.strip() and len(name) <= MAX_NAME_CHARS):
            raise InvalidConfig(f"a model has the name {shown(name)}: name it by [models.NAME] with a printable name")
        values = {**options, **{key: value for key, value in tables.get(name, {}).items() if key != "model"}}
        sources.append(Source(name, model, values, read_config(model, values)))
    models_of: dict[str, str] = {}
    for name, model in ((name, source.model) for source in sources for name in (source.name, *source.adapters)):
        if name in models_of:
            both = f"{models_of[name]} and {model}"
            raise InvalidConfig(
                f"two models or adapters have the name {shown(name)}: {both}; name one by [models.NAME]"
            )
        models_of[name] = model
    return {source.name: source for source in sources}


def _models_below(folder: Path) -> Iterator[Path]:
    """GGUF files (the first, if one comes in parts) and folders with a config.json; links to folders are not followed."""
    if not os.path.isdir(folder):
        raise InvalidConfig(f"models_dir is {shown(str(folder))}: it must be a folder")
    for count, (root, folders, files) in enumerate(os.walk(folder)):
        if count >= MAX_FOLDERS:
            raise InvalidConfig(f"models_dir is {shown(str(folder))}: it has more than {MAX_FOLDERS} folders")
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if "config.json" in files:
            yield Path(root)
        yield from first_parts(Path(root, name) for name in files if name.endswith(".gguf"))
