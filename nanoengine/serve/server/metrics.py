"""GET /metrics: a snapshot of the engine in Prometheus' text format, under the names of vLLM.

Names, labels, types, bounds of buckets and meanings are those of vLLM 0.33 (vllm/v1/metrics/loggers.py), so that dashboards and
autoscalers made for it work here. A metric that vLLM does not have begins with "nanoengine:". A metric that is counted is
declared where it is counted (`features/statistics.py`); here are those that follow from others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from nanoengine.features.observability.histogram import Histogram
from nanoengine.features.observability.metrics import EngineMetrics
from nanoengine.features.statistics import Statistics

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
"""Finish reasons of vLLM. Every series is there from the start: a series that begins with its first event shows no rate."""

REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
"""vLLM's reasons for refusing requests before they are queued."""


def render_metrics(
    engines: Mapping[str, EngineMetrics],
    *,
    model_name: str,
    cache_config: Mapping[str, str],
    num_rejected: Mapping[str, int],
) -> bytes:
    """The answer to `GET /metrics`, of the type CONTENT_TYPE.

    Args:
        engines: the snapshot of each, by its label.
        model_name: the first name that the model is served under.
        cache_config: options of the KV cache, as labels of vllm:cache_config_info beside those that the snapshot knows.
        num_rejected: the number of requests that were refused before they came to the engine, by reason.
    """
    metrics = _Metrics()
    for engine, snapshot in engines.items():
        labels = {"model_name": model_name, "engine": engine}
        metrics.add_declared(labels, snapshot)
        metrics.add_computed(labels, snapshot)
        metrics.add_cache_config(cache_config, engine, snapshot)
    for reason, count in (dict.fromkeys(REJECTIONS, 0) | dict(num_rejected)).items():
        text, labels = "Requests turned away at the door.", {"model_name": model_name, "reason": reason}
        metrics.add(CounterMetricFamily, "vllm:admission_rejections", text, labels, count)
    registry = CollectorRegistry()
    registry.register(metrics)
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Metrics(Collector):
    """The metrics of all engines, family by family."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        return iter(self._families.values())

    def add(self, kind: type[Metric], name: str, text: str, labels: Mapping[str, str], *values: object) -> None:
        """Add a series: the values of a histogram are its buckets and its sum, those of other families one number."""
        family = self._families.setdefault(name, kind(name, text, labels=tuple(labels)))  # type: ignore[call-arg]
        family.add_metric(tuple(labels.values()), *values)

    def add_declared(self, labels: Mapping[str, str], counts: Any) -> None:
        """The fields of statistics that `metric` declares, those of statistics inside of them included."""
        for each in fields(counts):
            value, facts = getattr(counts, each.name), each.metadata
            of_series = {**labels, **facts.get("labels", {})}
            if isinstance(value, Statistics):
                self.add_declared(labels, value)
            elif isinstance(value, Histogram):
                bounds = [*map(floatToGoString, value.bounds), "+Inf"]
                buckets = list(zip(bounds, value.cumulative(), strict=True))
                self.add(HistogramMetricFamily, facts["name"], facts["text"], of_series, buckets, value.sum)
            elif "name" in facts:
                kind = GaugeMetricFamily if "is_gauge" in facts else CounterMetricFamily
                self.add(kind, facts["name"], facts["text"], of_series, value)

    def add_computed(self, labels: Mapping[str, str], metrics: EngineMetrics) -> None:
        """What is no number of the statistics, but follows from some."""

        def counters(name: str, text: str, label: str, values: Mapping[str, float]) -> None:
            for key, value in values.items():
                self.add(CounterMetricFamily, name, text, {**labels, label: key}, value)

        times, drafts = metrics.times, metrics.speculation
        finished = dict.fromkeys(FINISH_REASONS, 0) | metrics.finished
        counters("vllm:request_success", "Sequences that ended, by why.", "finished_reason", finished)
        sources = {
            "local_compute": times.num_prompt_tokens - times.num_cached_prompt_tokens,
            "local_cache_hit": times.num_cached_prompt_tokens,
            "external_kv_transfer": 0,
        }
        counters("vllm:prompt_tokens_by_source", "Tokens of prompts, by where from.", "source", sources)
        if drafts is not None:
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            by_position = {str(position): count for position, count in enumerate(drafts.accepted_at)}
            counters(name, "Drafts accepted, by their position in a run.", "position", by_position)
        waiting, text = metrics.num_waiting + metrics.num_fetching, "Sequences that wait to run."
        self.add(GaugeMetricFamily, "vllm:num_requests_waiting", text, labels, waiting)

    def add_cache_config(self, cache_config: Mapping[str, str], engine: str, metrics: EngineMetrics) -> None:
        options = {
            **cache_config,
            "block_size": str(metrics.block_size),
            "num_gpu_blocks": str(metrics.num_blocks),
            "kv_cache_size_tokens": str(int(metrics.max_concurrency * metrics.max_model_len)),
            "kv_cache_max_concurrency": str(metrics.max_concurrency),
            "engine": engine,
        }
        self.add(GaugeMetricFamily, "vllm:cache_config_info", "Options of the KV cache; always 1.", options, 1)
