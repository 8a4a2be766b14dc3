"""What a model's files say of how its embeddings are made.

A folder for sentence-transformers has a modules.json, which lists folders of steps behind the model: one that pools, and perhaps
one that normalizes (https://sbert.net/docs/package_reference/sentence_transformer/models.html). A GGUF file has a number
(https://github.com/ggml-org/llama.cpp, include/llama.h, enum llama_pooling_type).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nanoengine.core.errors import UnsupportedModel, shown
from nanoengine.core.model_config import read_file

MODES = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "lasttoken": "last", "mean": "mean"}
"""Flags, as older versions write them; and values of `pooling_mode`, as newer ones do."""

NUMBERS = {0: "last", 1: "mean", 3: "last"}  # 0: none, the file is of a model that writes
STEPS = ("Transformer", "Pooling", "Normalize")
MAX_BYTES = 1 << 20


class Made(NamedTuple):
    """How a model's embeddings are made. `pooling` is None if it is in a way that is not supported."""

    pooling: str | None = "last"
    normalize: bool = True


def of_folder(folder: Path) -> Made:
    """As its modules.json says.

    Raises:
        UnsupportedModel: a file that is no such list or table.
    """
    if not (folder / "modules.json").is_file():
        return Made()
    steps = _read(folder / "modules.json", list)
    if not all(isinstance(step, dict) and isinstance(step.get("type"), str) for step in steps):
        raise UnsupportedModel(f"{folder / 'modules.json'} must hold a list of tables that have a type")
    kinds = [step["type"].rpartition(".")[2] for step in steps]
    paths = [str(step.get("path", "")) for step, kind in zip(steps, kinds, strict=True) if kind == "Pooling"]
    pooling = None
    if len(paths) == 1 and set(kinds) <= set(STEPS):
        table = _read(folder / paths[0] / "config.json", dict)
        flags = [name for name, value in table.items() if name.startswith("pooling_mode_") and value]
        modes = [str(said)] if (said := table.get("pooling_mode")) else flags
        pooling = MODES.get(modes[0]) if len(modes) == 1 else None
    return Made(pooling, "Normalize" in kinds)


def of_gguf(metadata: Mapping[str, Any]) -> Made:
    """As the metadata of a GGUF file say."""
    return Made(NUMBERS.get(metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)))


def _read(path: Path, kind: type) -> Any:
    try:
        content = json.loads(read_file(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} says how embeddings are made, and cannot be read: {error}") from error
    if not isinstance(content, kind):
        raise UnsupportedModel(f"{path} must hold a JSON {kind.__name__}, not {shown(content)}")
    return content
