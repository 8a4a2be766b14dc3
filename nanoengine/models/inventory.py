"""Inventory: the models on this machine, their sizes, and whether they run by their descriptions. No weights are loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from nanoengine.core.model_config import read_file
from nanoengine.errors import ModelNotFound, NanoEngineError
from nanoengine.models.architectures import UnsupportedArchitecture, read_model_config
from nanoengine.models.description import config_table
from nanoengine.models.fetch import DOWNLOADS, models_folder
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.names import WEIGHT_FILES, find_model, first_parts, gguf_parts
from nanoengine.ram import available_ram

COLUMNS = ("model", "architecture", "on disk", "KV of 1,000 tokens", "runs here")
LONGEST_PROBLEM = 160
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Entry:
    """The model of a name."""

    name: str
    disk_bytes: int = 0
    config: ModelConfig | None = None  # None: it cannot be read
    problem: str = ""  # the reason that it does not run here; empty: no known reason


def inventory() -> list[Entry]:
    """The bundled model, models that can be fetched, and models in the caches of nanoengine and of the hub's client."""
    return [describe(name, where) for name, where in _paths()]


def table(entries: Iterable[Entry]) -> str:
    """A text table of entries with a header."""
    rows = [COLUMNS, *map(_cells, entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _paths() -> Iterator[tuple[str, str]]:
    """Names of models, and their names or paths on this machine."""
    for name in ("demo", *DOWNLOADS):
        yield name, name
    fetched = {download.path for download in DOWNLOADS.values()}
    for file in first_parts(models_folder().glob("*.gguf")):
        if file not in fetched:
            yield str(file), str(file)
    yield from repositories()


def repositories() -> Iterator[tuple[str, str]]:
    """Names and paths of models in the hub's cache: models--ORG--NAME/refs/main names the commit that is below snapshots/.

    Read by its documented layout (https://huggingface.co/docs/huggingface_hub/guides/manage-cache): the client's scan leaves
    a repository out, or ends, where any file of any revision is broken.
    """
    from huggingface_hub import constants

    for main in sorted(Path(constants.HF_HUB_CACHE).glob("models--*/refs/main")):
        repository = main.parents[1]
        name = repository.name.removeprefix("models--").replace("--", "/")
        try:
            commit = COMMIT.fullmatch(read_file(main, 1000).decode(errors="replace"))
        except OSError:
            commit = None
        # Without a commit, `find_model` reports a missing config.json.
        folder = repository / "snapshots" / (commit[0] if commit else "")
        files = first_parts(folder.rglob("*.gguf"))
        if not files or (folder / "config.json").exists():
            yield name, str(folder)
        for file in files:
            yield f"{name}/{file.relative_to(folder).as_posix()}", str(file)


def _config(name: str, table: Mapping[str, Any]) -> ModelConfig:
    try:
        return read_model_config(table)
    except UnsupportedArchitecture:
        from nanoengine.models.model_impl import choose_implementation  # imports torch, which families do not need

        return choose_implementation(name, "auto", table, None, ()).config


def describe(name: str, where: str) -> Entry:
    """The entry of a model: `where` is what `find_model` finds it by."""
    disk_bytes, config = 0, None
    try:
        path = find_model(where)
        files = _files(path)
        disk_bytes = sum(file.stat().st_size for file in files)
        config = _config(where, config_table(path))
        if path.is_dir():
            weights = [file for file in files if file.parent == path and any(map(file.match, WEIGHT_FILES))]
        else:
            weights = files
        if not weights:
            raise ModelNotFound(f"no {', '.join(WEIGHT_FILES)}: its weights are not here yet")
        weight_bytes = sum(file.stat().st_size for file in weights)  # approximately the size in memory
        if weight_bytes > (available := available_ram()):
            return Entry(name, disk_bytes, config, f"not on the CPU: {_size(available)} of RAM are available")
    except (NanoEngineError, OSError) as error:
        if name in DOWNLOADS and not disk_bytes:
            megabytes = DOWNLOADS[name].num_bytes / 1e6
            return Entry(name, problem=f"not here yet: `nanoengine fetch {name}` ({megabytes:.0f} MB)")
        return Entry(name, disk_bytes, config, f"{type(error).__name__}: {error}")
    return Entry(name, disk_bytes, config)


def _files(path: Path) -> list[Path]:
    """All files of a model: of a folder, or of one that may be in parts."""
    if path.is_dir():
        return [file for file in path.rglob("*") if file.is_file()]
    return gguf_parts(path)


def _cells(entry: Entry) -> tuple[str, ...]:
    runs = f"no: {shorten(entry.problem, LONGEST_PROBLEM, placeholder=' ...')}" if entry.problem else "yes"
    disk = _size(entry.disk_bytes) if entry.disk_bytes else "-"
    if (config := entry.config) is None:
        return entry.name, "-", disk, "-", runs
    kv_bytes = 1000 * config.kv_bytes_per_token(4 if config.dtype == "float32" else 2)
    return entry.name, config.architecture, disk, _size(kv_bytes), runs


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
