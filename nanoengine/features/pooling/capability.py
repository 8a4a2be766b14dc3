"""Embeddings of prompts, as a capability of the engine."""

from __future__ import annotations

from nanoengine.core.capability import Capability
from nanoengine.core.startup import Startup
from nanoengine.features.pooling.files import defaults_of_folder, defaults_of_gguf
from nanoengine.features.pooling.options import PoolingOptions
from nanoengine.features.pooling.pooler import Pooler
from nanoengine.features.pooling.runner_part import PoolingPart


class Pooling(Capability):
    """Embeddings, for requests with `PoolingParams`."""

    options = PoolingOptions

    def runner(self, startup: Startup) -> None:
        startup.runner.parts.append(PoolingPart())

    def policy(self, startup: Startup) -> None:
        options, path = startup.config.of(PoolingOptions), startup.path
        defaults = defaults_of_folder(path) if path.is_dir() else defaults_of_gguf(startup.metadata)
        defaults = defaults._replace(pooling=options.pooling or defaults.pooling)
        startup.parts.append(Pooler(defaults, startup.model_config.hidden_size))
