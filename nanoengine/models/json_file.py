"""JSON tables in the files of a model folder, with or without a byte order mark."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanoengine.core import model_config
from nanoengine.core.errors import UnsupportedModel


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The table in a file. Raises as the core's `read_json`."""
    try:
        return model_config.read_json(folder, name)
    except UnsupportedModel:
        with suppress(OSError, ValueError, RecursionError):
            content = model_config.read_file(folder / name, model_config.MAX_JSON_BYTES)
            if content.startswith(BOM_UTF8) and isinstance(table := json.loads(content), dict):
                return table
        raise
