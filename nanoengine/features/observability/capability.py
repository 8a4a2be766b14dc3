"""Observability as a capability of the engine."""

from __future__ import annotations

from nanoengine.core.capability import Capability
from nanoengine.core.startup import Startup
from nanoengine.features.observability.observer import Observer


class Observability(Capability):
    """The observer of the engine, `metrics`, set by `policy`. This is the last capability: the others add `metric_sources`."""

    metrics: Observer

    def policy(self, startup: Startup) -> None:
        self.metrics = Observer(
            startup.max_model_len,
            startup.blocks_needed(startup.max_model_len),
            enable_prefix_caching=startup.config.enable_prefix_caching,
            sources=startup.metric_sources,
        )
        startup.parts.append(self.metrics)
        startup.stores.append(self.metrics.events)
