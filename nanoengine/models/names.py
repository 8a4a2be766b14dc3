"""Names of models: "demo", "smollm2", a folder, a .gguf file or a name of the hub, resolved to a path."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from nanoengine.errors import ModelNotFound, did_you_mean, shown
from nanoengine.models.fetch import DOWNLOADS
from nanoengine.models.gguf.file import PART
from nanoengine.models.gguf.header import MAGIC

DEMO = Path(__file__).parent.parent / "demo"
DESCRIPTION_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHT_FILES = ("*.safetensors",)

HUB_FILE = re.compile(r"([^/:]+/[^/:]+)[/:](.+\.gguf)")
"""A file in a repository of the hub: org/name/file.gguf, or org/name:file.gguf."""


def find_model(name: str, files: Sequence[str] = DESCRIPTION_FILES) -> Path:
    """The path of a model: "demo" is the bundled model, then fetched ones, then local paths, then the hub.

    Args:
        name: of a model.
        files: patterns of the files to fetch from a hub's repository: config and tokenizer are checked before gigabytes of
            weights. A .gguf file is fetched whole.

    Returns:
        A folder, or a GGUF file, whatever its name is: the first, if it comes in parts. A folder without a config.json but with
        one GGUF file stands for that.

    Raises:
        ModelNotFound: none of these, or more than one.
    """
    if name == "demo":
        return DEMO
    if name in DOWNLOADS:
        return _fetched(name)
    # As Path.expanduser and Path.is_dir, but an unknown user's ~ stays, and an invalid path is not a folder.
    path = Path(name if "\0" in name else os.path.expanduser(name))
    if os.path.isdir(path):
        return _in_folder(path)
    if is_gguf(path):
        return _first_part(path)
    match = HUB_FILE.fullmatch(name)
    is_path = path.is_absolute() or name.startswith((".", "~")) or (path.suffix == ".gguf" and match is None)
    if not is_path:
        if match is not None:
            return _file_of_hub(*match.groups())
        if name.count("/") == 1:
            return _in_folder(_snapshot(name, files))
    if is_path and not os.path.lexists(path):
        raise ModelNotFound(f"model {shown(name)} is not there: no file and no folder has this path")
    raise ModelNotFound(
        f"model {shown(name)} is neither a folder nor a GGUF file: give one of them, 'demo', "
        f"{', '.join(map(repr, DOWNLOADS))}, or a hub name like 'Qwen/Qwen3-0.6B' or 'org/name/file.gguf'"
        + did_you_mean(name, ("demo", *DOWNLOADS))
    )


def is_gguf(path: Path) -> bool:
    """Whether a file has the suffix or the magic number: Ollama's files have hashes as names."""
    if not os.path.isfile(path):
        return False
    with suppress(OSError), open(path, "rb") as file:
        return path.suffix == ".gguf" or file.read(len(MAGIC)) == MAGIC
    return path.suffix == ".gguf"


def first_parts(files: Iterable[Path]) -> list[Path]:
    """The models of .gguf files: parts of one model count once, as its first part."""
    return sorted({file.with_name(PART.sub(r"\g<stem>-00001-of-\g<count>.gguf", file.name)) for file in files})


def gguf_parts(first: Path) -> list[Path]:
    """All files of the model whose first GGUF file is at a path."""
    return [file for file in first.parent.glob("*.gguf") if first_parts([file]) == [first]] or [first]


def _fetched(name: str) -> Path:
    download = DOWNLOADS[name]
    if not download.path.is_file():
        raise ModelNotFound(
            f"{name} is not here yet: `nanoengine fetch {name}` gets it ({download.num_bytes / 1e6:.0f} MB, {download.licence}) "
            f"as {download.path}, and `nanoengine run {name}` gets it and starts a chat"
        )
    return download.path


def _in_folder(folder: Path) -> Path:
    if os.path.lexists(folder / "config.json"):
        return folder
    models = first_parts(filter(is_gguf, folder.glob("*")))
    if len(models) > 1:
        raise ModelNotFound(
            f"{folder} has no config.json and several GGUF files: name one of {', '.join(model.name for model in models)}"
        )
    return _first_part(models[0]) if models else folder


def _first_part(file: Path) -> Path:
    (first,) = first_parts([file])
    if not os.path.isfile(first):
        raise ModelNotFound(f"{first} is missing: {file.name} is a part of the same model and does not do without")
    return first


def _file_of_hub(repository: str, file: str) -> Path:
    folder = _snapshot(repository, [PART.sub(r"\g<stem>-*-of-\g<count>.gguf", file)])
    if not os.path.isfile(folder / file):
        raise ModelNotFound(
            f"{repository} on the hub has no {shown(file)} (or it was not fetched before, and HF_HUB_OFFLINE is set): "
            f"see https://huggingface.co/{repository}/tree/main"
        )
    return _first_part(folder / file)


def _snapshot(repository: str, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=list(files)))
    except Exception as error:  # of the many kinds that the hub client raises, all mean "not to be had"
        why = " ".join(str(error).split())  # in one line
        raise ModelNotFound(f"model {shown(repository)} is no folder, and the hub did not give it: {why}") from error
