"""PoolingDefaults: the pooling and normalization in the files of a model.

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
"""Flags of older versions, and values of `pooling_mode` of newer ones."""

NUMBERS = {"0": "last", "1": "mean", "3": "last"}  # 0: none, the file of a generative model
STEPS = ("Transformer", "Pooling", "Normalize")
MAX_BYTES = 1 << 20


class PoolingDefaults(NamedTuple):
    """How the embeddings of a model are made. `pooling` is None for an unsupported kind."""

    pooling: str | None = "last"
    normalize: bool = True


def defaults_of_folder(folder: Path) -> PoolingDefaults:
    """The defaults in its modules.json.

    Raises:
        UnsupportedModel: a file without such a list or table.
    """
    if not (folder / "modules.json").is_file():
        return PoolingDefaults()
    steps = _read(folder / "modules.json", list)
    if not all(isinstance(step, dict) and isinstance(step.get("type"), str) for step in steps):
        raise UnsupportedModel(f"{folder / 'modules.json'} must hold a list of tables that have a type")
    kinds = [step["type"].rpartition(".")[2] for step in steps]
    paths = [str(step.get("path", "")) for step, kind in zip(steps, kinds, strict=True) if kind == "Pooling"]
    pooling = None
    if len(paths) == 1 and set(kinds) <= set(STEPS):
        table = _read(folder / paths[0] / "config.json", dict)
        flags = [name for name, value in table.items() if name.startswith("pooling_mode_") and value]
        modes = [str(mode)] if (mode := table.get("pooling_mode")) else flags
        pooling = MODES.get(modes[0]) if len(modes) == 1 else None
    return PoolingDefaults(pooling, "Normalize" in kinds)


def defaults_of_gguf(metadata: Mapping[str, Any]) -> PoolingDefaults:
    """The defaults in the metadata of a GGUF file."""
    return PoolingDefaults(NUMBERS.get(str(metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0))))


def _read(path: Path, kind: type) -> Any:
    try:
        content = json.loads(read_file(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} says how embeddings are made, and cannot be read: {error}") from error
    if not isinstance(content, kind):
        raise UnsupportedModel(f"{path} must hold a JSON {kind.__name__}, not {shown(content)}")
    return content
