"""ReplicaObserver: stands where the observer of one engine does."""

from __future__ import annotations

from functools import reduce
from operator import add

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.observability.metrics import EngineMetrics, EngineStats
from nanoengine.observability.observer import Observer
from nanoengine.observability.view import EngineView, take_view
from nanoengine.replicas.counts import merged_views
from nanoengine.replicas.supervisor import Supervisor


class ReplicaObserver(Observer):
    """Stands where the observer of an engine does. Replicas tell what they count once a second.

    Args:
        own: of the engine without tensors, which counts nothing.
        supervisor: whose replicas they are.
    """

    def __init__(self, own: Observer, supervisor: Supervisor):
        super().__init__(own.max_model_len, own.blocks_of_longest)
        self.events, self.supervisor = own.events, supervisor

    def snapshots(self, engine: LLMEngine, *, summed: bool = False) -> dict[str, EngineMetrics]:
        found = {str(number): metrics for number, metrics in self.supervisor.counts.by_number().items()}
        return {"all": reduce(add, found.values())} if summed and found else found or super().snapshots(engine)

    def snapshot(self, engine: LLMEngine) -> EngineMetrics:
        """All counters of all replicas, as they stand now: they are asked, and their answers are waited for."""
        self.supervisor.ask_for_metrics()
        [found] = self.snapshots(engine, summed=True).values()
        return found

    def progress(self, engine: LLMEngine, before: EngineStats) -> str:
        return f"{self.supervisor.num_ready} replicas, {len(engine.requests)} requests"

    def view(self, engine: LLMEngine) -> EngineView:
        """A picture of all replicas, as they told it last."""
        views = self.supervisor.counts.views()
        return merged_views(views) if views else take_view(engine, self)
