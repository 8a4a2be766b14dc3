"""Observability as a capability of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoengine.core.capability import Capability
from nanoengine.observability.kv_events import KVEventPublisher
from nanoengine.observability.metrics import Metrics
from nanoengine.observability.observer import Observer

if TYPE_CHECKING:
    from nanoengine.core.startup import Startup


class Observability(Capability):
    """`metrics` is set by `policy`. It must be the last capability: the others put facts for it into `startup.facts`."""

    metrics: Metrics

    def policy(self, startup: Startup) -> None:
        """Facts: "metrics", see `metrics.Sources`."""
        caching = startup.config.enable_prefix_caching
        observer = Observer(startup.max_model_len, enable_prefix_caching=caching)
        events = KVEventPublisher()
        startup.stores.append(events)
        startup.parts += [observer, events]
        self.metrics = Metrics(
            startup.max_model_len,
            startup.blocks_needed(startup.max_model_len),
            observer,
            events,
            sources=startup.facts.get("metrics"),
        )
