"""The JSON files that describe a model: read with care, since anybody may have written them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nanoengine.errors import ModelNotFound, UnsupportedModel

MAX_JSON_BYTES = 64 << 20
"""Largest table that is read; the indexes of the largest models have a fifth of it."""


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON table in `folder / name`.

    Raises:
        ModelNotFound: no such file, or it cannot be read.
        UnsupportedModel: it is not a JSON table, or one too large or too deep to be sound.
    """
    path = folder / name
    if not os.path.isfile(path):
        raise ModelNotFound(
            f"{path} is missing: a model is a folder with config.json, *.safetensors and tokenizer files, or a .gguf file "
            "(of the hub: org/name/file.gguf)"
        )
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise UnsupportedModel(f"{path} has {size} bytes: a table of at most {MAX_JSON_BYTES} is read")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error}") from error
    except RecursionError as error:
        raise UnsupportedModel(
            f"{path} is not valid JSON for a model: its tables lie too deep in each other"
        ) from error
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} must hold a JSON table, not {type(content).__name__}")
    return content
