"""GET /metrics: a snapshot of the engine in Prometheus' text format, under the names of vLLM.

Names, labels, types, bounds of buckets and meanings are those of vLLM 0.33 (vllm/v1/metrics/loggers.py), so that dashboards and
autoscalers made for it work here. A metric that vLLM does not have begins with "nanoengine:". A metric that is one number or
histogram is declared where it is counted (`features/statistics.py`); here are those with labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from nanoengine.features.observability.histogram import Histogram
from nanoengine.features.observability.metrics import EngineMetrics
from nanoengine.features.statistics import Statistics

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

REJECTED = "vllm:admission_rejections"
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
    registry = CollectorRegistry()
    registry.register(
        _Snapshots([_Snapshot(*item, model_name, cache_config, num_rejected) for item in engines.items()])
    )
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Snapshots(Collector):
    """The metrics of all engines, family by family."""

    def __init__(self, snapshots: list[_Snapshot]):
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for snapshot in self._snapshots:
            for family in snapshot.collect():
                known = families.setdefault(family.name, family)
                if known is not family and family.name != REJECTED:  # which is the server's
                    known.samples += family.samples
        return iter(families.values())


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """`render_metrics` of one engine, family by family."""

    engine: str  # its label
    metrics: EngineMetrics
    model_name: str
    cache_config: Mapping[str, str]
    num_rejected: Mapping[str, int]

    def collect(self) -> Iterator[Metric]:
        yield from self._declared(self.metrics)
        yield from self._labelled()
        yield from self._others()

    def _declared(self, counts: Any) -> Iterator[Metric]:
        """The fields of statistics that `metric` declares, those of statistics inside of them included."""
        for each in fields(counts):
            value = getattr(counts, each.name)
            if isinstance(value, Statistics):
                yield from self._declared(value)
            elif isinstance(value, Histogram):
                yield self._histogram(each.metadata["name"], each.metadata["text"], value)
            elif "name" in each.metadata:
                kind = GaugeMetricFamily if "is_gauge" in each.metadata else CounterMetricFamily
                yield self._family(kind, each.metadata["name"], each.metadata["text"], {"": value})

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=("model_name", "engine"))
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, histogram.cumulative(), strict=True))
        family.add_metric((self.model_name, self.engine), buckets, histogram.sum)
        return family

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        values: Mapping[str, float],
        label: str = "",
    ) -> Metric:
        """A series for each value of a label; without a label, a single one."""
        family = kind(name, text, labels=("model_name", "engine", *([label] if label else [])))
        for key, value in values.items():
            family.add_metric((self.model_name, self.engine, *([key] if label else [])), value)
        return family

    def _labelled(self) -> Iterator[Metric]:
        metrics, times, drafts = self.metrics, self.metrics.times, self.metrics.speculation
        counter = partial(self._family, CounterMetricFamily)
        finished = dict.fromkeys(FINISH_REASONS, 0.0) | metrics.finished
        yield counter("vllm:request_success", "Sequences that ended, by why.", finished, "finished_reason")
        sources = {
            "local_compute": times.num_prompt_tokens - times.num_cached_prompt_tokens,
            "local_cache_hit": times.num_cached_prompt_tokens,
            "external_kv_transfer": 0,
        }
        yield counter("vllm:prompt_tokens_by_source", "Tokens of prompts, by where from.", sources, "source")
        seconds = {"prefill": metrics.steps.prefill_time, "decode": metrics.steps.decode_time}
        yield counter("nanoengine:step_seconds", "Time of steps, shared out by their tokens.", seconds, "phase")
        if drafts is not None:
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            by_position = {str(position): count for position, count in enumerate(drafts.accepted_at)}
            yield counter(name, "Drafts accepted, by their position in a run.", by_position, "position")
        if (offload := metrics.offload) is not None:
            moves = {
                "device_to_host": offload.num_saved_blocks,
                "host_to_device": offload.num_loaded_blocks,
                "to_disk": offload.num_written_files,
                "from_disk": offload.num_loaded_files,
            }
            yield counter("nanoengine:kv_blocks_moved", "Blocks of K/V copied between tiers.", moves, "way")

    def _others(self) -> Iterator[Metric]:
        metrics, gauge = self.metrics, partial(self._family, GaugeMetricFamily)
        reasons = {"capacity": metrics.num_waiting, "deferred": metrics.num_fetching}
        yield gauge("vllm:num_requests_waiting", "Sequences that wait to run.", {"": sum(reasons.values())})
        text = "Sequences that wait to run: for room, or deferred until their K/V were read from files."
        yield gauge("vllm:num_requests_waiting_by_reason", text, reasons, "reason")
        rejected = CounterMetricFamily(REJECTED, "Requests turned away at the door.", labels=("model_name", "reason"))
        for reason, count in (dict.fromkeys(REJECTIONS, 0) | dict(self.num_rejected)).items():
            rejected.add_metric((self.model_name, reason), count)
        yield rejected
        options = {
            **self.cache_config,
            "block_size": str(metrics.block_size),
            "num_gpu_blocks": str(metrics.num_blocks),
            "kv_cache_size_tokens": str(int(metrics.max_concurrency * metrics.max_model_len)),
            "kv_cache_max_concurrency": str(metrics.max_concurrency),
            "engine": self.engine,
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "Options of the KV cache; always 1.", labels=tuple(options))
        info.add_metric(tuple(options.values()), 1)
        yield info
