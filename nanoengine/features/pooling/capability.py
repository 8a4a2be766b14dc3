"""Embeddings of prompts as a capability of the engine."""

from __future__ import annotations

from nanoengine.core.capability import Capability
from nanoengine.core.startup import Startup
from nanoengine.features.pooling.files import of_folder, of_gguf
from nanoengine.features.pooling.options import PoolingOptions
from nanoengine.features.pooling.pooler import Pooler
from nanoengine.features.pooling.runner_part import PoolingPart


class Pooling(Capability):
    """An embedding is asked for with `PoolingParams`."""

    options = PoolingOptions

    def runner(self, startup: Startup) -> None:
        startup.runner.parts.append(PoolingPart())

    def policy(self, startup: Startup) -> None:
        own, path = startup.config.of(PoolingOptions), startup.path
        made = of_folder(path) if path.is_dir() else of_gguf(startup.metadata)
        made = made._replace(pooling=own.pooling or made.pooling)
        startup.parts.append(Pooler(made, startup.model_config.hidden_size))
