"""Options of engines whose model is computed in other processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.startup import Startup

FRONT_ONLY: dict[str, Any] = {"lora_modules": None}
"""Options without effect in a process that only computes: the process with the requests reads adapters and sends them."""


def check_shared(startup: Startup, ranks: int) -> None:
    """Raise InvalidConfig for several ranks and layers of transformers, which ranks cannot partition."""
    if ranks > 1 and startup.layers_library:
        raise InvalidConfig(
            f"tensor_parallel_size is {ranks}, but ranks do not share layers that transformers computes: use 1, or a model "
            "with a family here and model_impl='auto'"
        )


def replaced(config: EngineConfig, values: Mapping[str, Any]) -> EngineConfig:
    """A copy of the config with other values of these options; options that no capability has are left out."""
    options = {
        kind: dataclasses.replace(old, **{name: value for name, value in values.items() if hasattr(old, name)})
        for kind, old in config.options.items()
    }
    return dataclasses.replace(config, options=options)
