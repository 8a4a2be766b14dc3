"""Embeddings of prompts as a capability of the engine."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from nanoengine.core.capability import Capability
from nanoengine.pooling.files import Made, of_folder, of_gguf
from nanoengine.pooling.options import PoolingOptions
from nanoengine.pooling.pooler import Pooler
from nanoengine.pooling.runner_part import PoolingPart

if TYPE_CHECKING:
    from nanoengine.core.startup import Startup


class Pooling(Capability):
    """An embedding is asked for with `PoolingParams`."""

    options = PoolingOptions

    def runner(self, startup: Startup) -> None:
        startup.runner.parts.append(PoolingPart())

    def policy(self, startup: Startup) -> None:
        own, made = startup.config.of(PoolingOptions), _made(startup.facts.get("path", Path(startup.config.model)))
        made = made._replace(pooling=own.pooling or made.pooling)
        startup.parts.append(Pooler(made, startup.model_config.hidden_size))


def _made(path: Path) -> Made:
    """What the files of a model say."""
    if path.is_dir():
        return of_folder(path)
    metadata = import_module("nanoengine.gguf.file").GGUFFile.open(path).metadata  # who has such a file has read it
    return of_gguf(metadata)
