"""Which models are on this machine, what they take, and whether their descriptions say that they run. Nothing is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten

from nanoengine.core.model_config import read_file
from nanoengine.core.ram import available_ram
from nanoengine.errors import ModelNotFound, NanoEngineError
from nanoengine.models.architectures import read_model_config
from nanoengine.models.description import config_table
from nanoengine.models.fetch import DOWNLOADS, models_folder
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.names import WEIGHT_FILES, find_model, first_parts
from nanoengine.models.quantization.scheme import read_scheme

COLUMNS = ("model", "architecture", "parameters", "on disk", "weights in memory", "KV of 1,000 tokens", "runs here")
LONGEST_PROBLEM = 160
FLOATS = ("F32", "F16", "BF16")
"""Types of tensors in GGUF files that are plain numbers."""
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A model that a name stands for."""

    name: str
    disk_bytes: int = 0
    config: ModelConfig | None = None  # its shape, where that can be read
    problem: str = ""  # why it does not run here; empty if nothing is known that keeps it from it
    quantized_bytes: int = 0  # of weights that stay as the files have them; 0: they are not quantized

    @property
    def weight_bytes(self) -> int:
        """In memory: as the files have them, or in the dtype of the checkpoint."""
        assert self.config is not None
        return self.quantized_bytes or self.config.num_parameters() * _width(self.config.dtype)


def inventory() -> list[Entry]:
    """The bundled model, those that can be fetched, and what is in the caches of nanoengine and of the hub's client."""
    return [_describe(name, where) for name, where in _places()]


def table(entries: Iterable[Entry]) -> str:
    """Entries as lines of text in columns, below their names."""
    rows = [COLUMNS, *map(_cells, entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _places() -> Iterator[tuple[str, str]]:
    """Names, and where each leads on this machine."""
    for name in ("demo", *DOWNLOADS):
        yield name, name
    fetched = {download.path for download in DOWNLOADS.values()}
    for file in first_parts(models_folder().glob("*.gguf")):
        if file not in fetched:
            yield str(file), str(file)
    yield from _repositories()


def _repositories() -> Iterator[tuple[str, str]]:
    """Names and paths of models in the hub's cache: models--ORG--NAME/refs/main names the commit that is below snapshots/.

    Read by its documented layout (https://huggingface.co/docs/huggingface_hub/guides/manage-cache): the client's own scan leaves
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
        # Without one, no config.json will be found below it, and that is told.
        folder = repository / "snapshots" / (commit[0] if commit else "")
        files = first_parts(folder.rglob("*.gguf"))
        if not files or (folder / "config.json").exists():
            yield name, str(folder)
        for file in files:
            yield f"{name}/{file.relative_to(folder).as_posix()}", str(file)


def _describe(name: str, where: str) -> Entry:
    disk_bytes, config, quantized_bytes = 0, None, 0
    try:
        path = find_model(where)
        files = _files(path)
        disk_bytes = sum(file.stat().st_size for file in files)
        config = read_model_config(config_table(path))
        if path.is_dir() and not any(file.match(pattern) for file in files for pattern in WEIGHT_FILES):
            raise ModelNotFound(f"no {', '.join(WEIGHT_FILES)}: its weights are not here yet")
        quantized_bytes = _quantized_bytes(path, files)
    except (NanoEngineError, OSError) as error:
        if name in DOWNLOADS and not disk_bytes:
            megabytes = DOWNLOADS[name].num_bytes / 1e6
            return Entry(name, problem=f"not here yet: `nanoengine fetch {name}` ({megabytes:.0f} MB)")
        return Entry(name, disk_bytes, config, f"{type(error).__name__}: {error}")
    entry = Entry(name, disk_bytes, config, "", quantized_bytes)
    if entry.weight_bytes > (available := available_ram()):
        return replace(entry, problem=f"not on the CPU: {_size(available)} of RAM are available")
    return entry


def _quantized_bytes(path: Path, files: Iterable[Path]) -> int:
    """Of weights in a form of their own; 0 if they are plain numbers."""
    if path.is_dir():
        weights = [file for file in files if any(file.match(pattern) for pattern in WEIGHT_FILES)]
        return 0 if read_scheme(config_table(path)) is None else sum(file.stat().st_size for file in weights)
    tensors = GGUFFile.open(path).tensors.values()
    return sum(own.nbytes for own in tensors) if any(own.type not in FLOATS for own in tensors) else 0


def _files(path: Path) -> list[Path]:
    """All files of a model: of a folder, or of one that may be in parts."""
    if path.is_dir():
        return [file for file in path.rglob("*") if file.is_file()]
    return [file for file in path.parent.glob("*.gguf") if first_parts([file]) == [path]]


def _cells(entry: Entry) -> tuple[str, ...]:
    runs = f"no: {shorten(entry.problem, LONGEST_PROBLEM, placeholder=' ...')}" if entry.problem else "yes"
    disk = _size(entry.disk_bytes) if entry.disk_bytes else "-"
    if (config := entry.config) is None:
        return entry.name, "-", "-", disk, "-", "-", runs
    kv_bytes = 1000 * config.kv_bytes_per_token(_width(config.dtype))
    parameters = f"{config.num_parameters() / 1e6:,.1f} M"
    weights = f"{_size(entry.weight_bytes)} {'as stored' if entry.quantized_bytes else f'in {config.dtype}'}"
    return entry.name, config.architecture, parameters, disk, weights, _size(kv_bytes), runs


def _width(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
