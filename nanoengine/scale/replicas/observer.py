"""ReplicaObserver: counters and view of all replicas, in the shape of the ones of one engine."""

from __future__ import annotations

from functools import reduce
from operator import add

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.features.observability.metrics import EngineMetrics, EngineStats
from nanoengine.features.observability.observer import Observer
from nanoengine.features.observability.view import EngineView, view_of_engine
from nanoengine.scale.replicas.counts import merged_views
from nanoengine.scale.replicas.supervisor import Supervisor


class ReplicaObserver(Observer):
    """The observer of a `ReplicatedEngine`. Replicas send their counters once a second.

    Args:
        observer: of the front, which counts no step.
        supervisor: of the replicas.
    """

    def __init__(self, observer: Observer, supervisor: Supervisor):
        super().__init__(observer.max_model_len, observer.blocks_of_longest)
        self.events, self.supervisor = observer.events, supervisor

    def snapshots(self, engine: LLMEngine, *, summed: bool = False) -> dict[str, EngineMetrics]:
        counters = {str(number): metrics for number, metrics in self.supervisor.counts.by_number().items()}
        return {"all": reduce(add, counters.values())} if summed and counters else counters or super().snapshots(engine)

    def snapshot(self, engine: LLMEngine) -> EngineMetrics:
        """The counters of all replicas at this moment; waits for their answers."""
        self.supervisor.refresh_metrics()
        [total] = self.snapshots(engine, summed=True).values()
        return total

    def progress(self, engine: LLMEngine, before: EngineStats) -> str:
        return f"{self.supervisor.num_ready} replicas, {len(engine.requests)} requests"

    def view(self, engine: LLMEngine) -> EngineView:
        """The last view of all replicas."""
        views = self.supervisor.counts.views()
        return merged_views(views) if views else view_of_engine(engine, self)
