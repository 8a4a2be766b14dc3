"""The metrics of several models in one text for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class ModelsCollector(Collector):
    """All samples, each with the label `model`.

    Args:
        texts: the metrics of a model's server, by the model.
        states: of each model.
    """

    def __init__(self, texts: Mapping[str, str], states: Mapping[str, str]):
        self.texts, self.states = texts, states

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model, text in self.texts.items():
            for one in text_string_to_metric_families(text):
                family = families.setdefault(one.name, Metric(one.name, one.documentation, one.type))
                family.samples += [s._replace(labels={"model": model, **s.labels}) for s in one.samples]
        yield from families.values()
        of_states = GaugeMetricFamily(
            "nanoengine:model_state", "1 for the state of each model.", labels=["model", "state"]
        )
        for model, state in self.states.items():
            of_states.add_metric([model, state], 1)
        yield of_states


def merged(texts: Mapping[str, str], states: Mapping[str, str]) -> bytes:
    """The metrics of models and of this process. Arguments: see `ModelsCollector`."""
    registry = CollectorRegistry()
    registry.register(ModelsCollector(texts, states))
    ProcessCollector(namespace="nanoengine_front", registry=registry)
    return generate_latest(registry)
