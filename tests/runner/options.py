"""Options of a runner of a tiny model, and the model's shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanoengine.config import EngineConfig
from nanoengine.core.model_config import read_json
from nanoengine.models.architectures import read_model_config
from nanoengine.models.model_config import ModelConfig


def engine_config(folder: Path, **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"num_kv_blocks": 64, "device": "cpu"}
    return EngineConfig(model=str(folder), **defaults | options)


def shape(folder: Path, **changes: Any) -> ModelConfig:
    return read_model_config(read_json(folder, "config.json") | changes)
