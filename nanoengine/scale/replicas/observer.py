"""ReplicaObserver: the counters and the view of all replicas, in place of those of one engine."""

from __future__ import annotations

from functools import reduce
from operator import add

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.features.observability.metrics import EngineMetrics, EngineStats
from nanoengine.features.observability.observer import Observer
from nanoengine.features.observability.view import EngineView, take_view
from nanoengine.scale.replicas.counts import merged_views
from nanoengine.scale.replicas.supervisor import Supervisor


class ReplicaObserver(Observer):
    """The observer of a `ReplicatedEngine`. Replicas send their counters once a second.

    Args:
        own: the observer of the engine without tensors, which counts nothing.
        supervisor: of the replicas.
    """

    def __init__(self, own: Observer, supervisor: Supervisor):
        super().__init__(own.max_model_len, own.blocks_of_longest)
        self.events, self.supervisor = own.events, supervisor

    def snapshots(self, engine: LLMEngine, *, summed: bool = False) -> dict[str, EngineMetrics]:
        found = {str(number): metrics for number, metrics in self.supervisor.counts.by_number().items()}
        return {"all": reduce(add, found.values())} if summed and found else found or super().snapshots(engine)

    def snapshot(self, engine: LLMEngine) -> EngineMetrics:
        """The counters of all replicas at this moment: asks the replicas, and waits for their answers."""
        self.supervisor.ask_for_metrics()
        [found] = self.snapshots(engine, summed=True).values()
        return found

    def progress(self, engine: LLMEngine, before: EngineStats) -> str:
        return f"{self.supervisor.num_ready} replicas, {len(engine.requests)} requests"

    def view(self, engine: LLMEngine) -> EngineView:
        """The last view of all replicas."""
        views = self.supervisor.counts.views()
        return merged_views(views) if views else take_view(engine, self)
