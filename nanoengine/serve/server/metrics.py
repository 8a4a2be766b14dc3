"""GET /metrics: a snapshot of the engine in Prometheus' text format, under the names of vLLM.

Names, labels, types, bounds of buckets and meanings are those of vLLM 0.33 (vllm/v1/metrics/loggers.py), so that dashboards and
autoscalers made for it work here. What vLLM has no name for begins with "nanoengine:".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from nanoengine.features.observability.histogram import Histogram
from nanoengine.features.observability.metrics import EngineMetrics

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
    registry.register(_Snapshots([_Snapshot(*own, model_name, cache_config, num_rejected) for own in engines.items()]))
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
        for name, text, value in self._gauges():
            yield self._family(GaugeMetricFamily, name, text, "", {"": value})
        for name, text, count in self._counters():
            yield self._family(CounterMetricFamily, name, text, "", {"": count})
        for name, text, label, counts in self._labelled_counters():
            yield self._family(CounterMetricFamily, name, text, label, counts)
        for name, text, histogram in self._histograms():
            family = HistogramMetricFamily(name, text, labels=("model_name", "engine"))
            bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
            buckets = list(zip(bounds, histogram.cumulative(), strict=True))
            family.add_metric((self.model_name, self.engine), buckets, histogram.sum)
            yield family
        yield from self._others()

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        """A series for each value of a label; without a label, a single one."""
        family = kind(name, text, labels=("model_name", "engine", *([label] if label else [])))
        for key, value in values.items():
            family.add_metric((self.model_name, self.engine, *([key] if label else [])), value)
        return family

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        own = self.metrics
        yield "vllm:num_requests_running", "Sequences that have blocks and a row.", own.num_running
        yield "vllm:num_requests_waiting", "Sequences that wait to run.", own.num_waiting + own.num_fetching
        yield "vllm:kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1.", own.kv_usage

    def _counters(self) -> Iterator[tuple[str, str, float]]:
        own, times, cache, drafts = self.metrics, self.metrics.times, self.metrics.cache, self.metrics.speculation
        yield "vllm:num_preemptions", "Times that a sequence had to give way.", own.num_preemptions
        yield "vllm:prompt_tokens", "Tokens of prompts, cached ones included.", times.num_prompt_tokens
        yield "vllm:prompt_tokens_cached", "Tokens of prompts that were not computed.", times.num_cached_prompt_tokens
        yield "vllm:generation_tokens", "Tokens generated.", times.num_generated_tokens
        yield "vllm:prefix_cache_queries", "Tokens looked up in the cache.", cache.num_queried_tokens
        yield "vllm:prefix_cache_hits", "Tokens found there, in any tier.", cache.num_hit_tokens
        if drafts is not None:
            yield "vllm:spec_decode_num_drafts", "Runs of drafts that were verified.", drafts.num_runs
            yield "vllm:spec_decode_num_draft_tokens", "Drafts that were verified.", drafts.num_drafts
            yield "vllm:spec_decode_num_accepted_tokens", "Drafts that were accepted.", drafts.num_accepted
        if own.offload is not None:
            yield "nanoengine:kv_file_errors", "Files that could not be read.", own.offload.num_bad_files

    def _labelled_counters(self) -> Iterator[tuple[str, str, str, Mapping[str, float]]]:
        own, times, drafts, offload = self.metrics, self.metrics.times, self.metrics.speculation, self.metrics.offload
        finished = dict.fromkeys(FINISH_REASONS, 0.0) | own.finished
        yield "vllm:request_success", "Sequences that ended, by why.", "finished_reason", finished
        sources = {
            "local_compute": times.num_prompt_tokens - times.num_cached_prompt_tokens,
            "local_cache_hit": times.num_cached_prompt_tokens,
            "external_kv_transfer": 0,
        }
        yield "vllm:prompt_tokens_by_source", "Tokens of prompts, by where from.", "source", sources
        seconds = {"prefill": own.steps.prefill_time, "decode": own.steps.decode_time}
        yield "nanoengine:step_seconds", "Time of steps, shared out by their tokens.", "phase", seconds
        if drafts is not None:
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            by_place = {str(place): float(count) for place, count in enumerate(drafts.accepted_at)}
            yield name, "Drafts accepted, by their place in a run.", "position", by_place
        if offload is not None:
            moves = {
                "device_to_host": offload.num_saved_blocks,
                "host_to_device": offload.num_loaded_blocks,
                "to_disk": offload.num_written_files,
                "from_disk": offload.num_loaded_files,
            }
            yield "nanoengine:kv_blocks_moved", "Blocks of K/V copied between tiers.", "way", moves

    def _histograms(self) -> Iterator[tuple[str, str, Histogram]]:
        own = self.metrics.times
        yield "vllm:iteration_tokens_total", "Tokens of a step.", own.tokens_of_step
        yield "vllm:time_to_first_token_seconds", "From arrival to the first token.", own.time_to_first_token
        text = "Between the steps that brought a sequence tokens."
        yield "vllm:inter_token_latency_seconds", text, own.inter_token_latency
        yield "vllm:e2e_request_latency_seconds", "From arrival to the end.", own.latency
        text = "Mean time per token after the first."
        yield "vllm:request_time_per_output_token_seconds", text, own.time_per_token
        yield "vllm:request_queue_time_seconds", "From arrival to the first step.", own.queue_time
        yield "vllm:request_prefill_time_seconds", "From the first step to the first token.", own.prefill_time
        yield "vllm:request_decode_time_seconds", "From the first token to the last.", own.decode_time
        yield "vllm:request_inference_time_seconds", "From the first step to the last token.", own.inference_time
        yield "vllm:request_prompt_tokens", "Tokens of a prompt.", own.prompt_length
        yield "vllm:request_generation_tokens", "Tokens generated for a sequence.", own.generated_length
        text = "Tokens generated for the longest sequence of a request."
        yield "vllm:request_max_num_generation_tokens", text, own.longest_generated
        yield "vllm:request_params_n", "n, as it was asked for.", own.num_completions
        yield "vllm:request_params_max_tokens", "max_tokens, as it was asked for.", own.max_tokens
        yield "vllm:request_num_preemptions", "Preemptions of a sequence.", own.num_preemptions
        text = "Tokens of a prompt that the cache did not have."
        yield "vllm:request_prefill_kv_computed_tokens", text, own.computed_prompt_length

    def _others(self) -> Iterator[Metric]:
        own = self.metrics
        text = "Sequences that wait to run: for room, or deferred until their K/V were read from files."
        reasons = {"capacity": own.num_waiting, "deferred": own.num_fetching}
        yield self._family(GaugeMetricFamily, "vllm:num_requests_waiting_by_reason", text, "reason", reasons)
        rejected = CounterMetricFamily(REJECTED, "Requests turned away at the door.", labels=("model_name", "reason"))
        for reason, count in (dict.fromkeys(REJECTIONS, 0) | dict(self.num_rejected)).items():
            rejected.add_metric((self.model_name, reason), count)
        yield rejected
        options = {
            **self.cache_config,
            "block_size": str(own.block_size),
            "num_gpu_blocks": str(own.num_blocks),
            "kv_cache_size_tokens": str(int(own.max_concurrency * own.max_model_len)),
            "kv_cache_max_concurrency": str(own.max_concurrency),
            "engine": self.engine,
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "Options of the KV cache; always 1.", labels=tuple(options))
        info.add_metric(tuple(options.values()), 1)
        yield info
