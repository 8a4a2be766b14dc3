"""What `GET /metrics` answers: one snapshot of the engine in Prometheus' text format, under the names of vLLM.

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

from nanoengine.observability.histogram import Histogram
from nanoengine.observability.metrics import EngineMetrics

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

ENGINE = "0"
"""The label of the one engine that there is."""

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
"""Those of vLLM. Every series is there from the start, since rates cannot be seen in one that begins with its first event."""

REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
"""Why vLLM turns requests away at the door."""


def render_metrics(
    metrics: EngineMetrics, *, model_name: str, cache_config: Mapping[str, str], num_rejected: Mapping[str, int]
) -> bytes:
    """The answer to `GET /metrics`, of the type CONTENT_TYPE.

    Args:
        metrics: the snapshot.
        model_name: the first name that the model is served under.
        cache_config: options of the KV cache, as labels of vllm:cache_config_info beside those that the snapshot knows.
        num_rejected: by reason, how many requests were turned away before they came to the engine.
    """
    registry = CollectorRegistry()
    registry.register(_Snapshot(metrics, model_name, cache_config, num_rejected))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


@dataclass(frozen=True, eq=False)
class _Snapshot(Collector):
    """`render_metrics`, family by family."""

    metrics: EngineMetrics
    model_name: str
    cache_config: Mapping[str, str]
    num_rejected: Mapping[str, int]

    def collect(self) -> Iterator[Metric]:
        yield from self._state()
        yield from self._totals()
        yield from self._lengths()
        yield from self._times()
        yield from self._speculation()
        yield from self._own()

    # ---- kinds of families

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._by(GaugeMetricFamily, name, text, {(): value})

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._by(CounterMetricFamily, name, text, {(): value})

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        return self._by(CounterMetricFamily, name, text, {(key,): value for key, value in values.items()}, label)

    def _by(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        values: Mapping[tuple[str, ...], float],
        *label: str,
    ) -> Metric:
        """A family with a series for each value of a label, or with a single one."""
        family = kind(name, text, labels=("model_name", "engine", *label))
        for key, value in values.items():
            family.add_metric((self.model_name, ENGINE, *key), value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=("model_name", "engine"))
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        family.add_metric(
            (self.model_name, ENGINE), list(zip(bounds, histogram.cumulative(), strict=True)), histogram.sum
        )
        return family

    # ---- families

    def _state(self) -> Iterator[Metric]:
        metrics = self.metrics
        num_waiting = metrics.num_waiting + metrics.num_fetching
        yield self._gauge("vllm:num_requests_running", "Sequences that have blocks and a row.", metrics.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait to run.", num_waiting)
        yield self._by(
            GaugeMetricFamily,
            "vllm:num_requests_waiting_by_reason",
            "Sequences that wait to run: for room, or deferred until their K/V were read from files.",
            {("capacity",): metrics.num_waiting, ("deferred",): metrics.num_fetching},
            "reason",
        )
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1.", metrics.kv_usage)
        options = {
            **self.cache_config,
            "block_size": str(metrics.block_size),
            "num_gpu_blocks": str(metrics.num_blocks),
            "kv_cache_size_tokens": str(int(metrics.max_concurrency * metrics.max_model_len)),
            "kv_cache_max_concurrency": str(metrics.max_concurrency),
            "engine": ENGINE,
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "Options of the KV cache; always 1.", labels=tuple(options))
        info.add_metric(tuple(options.values()), 1)
        yield info

    def _totals(self) -> Iterator[Metric]:
        metrics, times, cache = self.metrics, self.metrics.times, self.metrics.cache
        finished = dict.fromkeys(FINISH_REASONS, 0.0) | metrics.finished
        yield self._counters("vllm:request_success", "Sequences that ended, by why.", "finished_reason", finished)
        rejected = CounterMetricFamily(
            "vllm:admission_rejections", "Requests turned away at the door.", labels=("model_name", "reason")
        )
        for reason, count in (dict.fromkeys(REJECTIONS, 0) | dict(self.num_rejected)).items():
            rejected.add_metric((self.model_name, reason), count)
        yield rejected
        yield self._counter("vllm:num_preemptions", "Times that a sequence had to give way.", metrics.num_preemptions)
        yield self._counter("vllm:prompt_tokens", "Tokens of prompts, cached ones included.", times.num_prompt_tokens)
        sources = {
            "local_compute": times.num_prompt_tokens - times.num_cached_prompt_tokens,
            "local_cache_hit": times.num_cached_prompt_tokens,
            "external_kv_transfer": 0,
        }
        yield self._counters("vllm:prompt_tokens_by_source", "Tokens of prompts, by where from.", "source", sources)
        cached = times.num_cached_prompt_tokens
        yield self._counter("vllm:prompt_tokens_cached", "Tokens of prompts that were not computed.", cached)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", times.num_generated_tokens)
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked up in the cache.", cache.num_queried_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Tokens found there, in any tier.", cache.num_hit_tokens)

    def _lengths(self) -> Iterator[Metric]:
        times, histogram = self.metrics.times, self._histogram
        yield histogram("vllm:iteration_tokens_total", "Tokens of a step.", times.tokens_of_step)
        yield histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", times.prompt_length)
        yield histogram("vllm:request_generation_tokens", "Tokens generated for a sequence.", times.generated_length)
        yield histogram(
            "vllm:request_max_num_generation_tokens",
            "Tokens generated for the longest sequence of a request.",
            times.longest_generated,
        )
        yield histogram("vllm:request_params_n", "n, as it was asked for.", times.num_completions)
        yield histogram("vllm:request_params_max_tokens", "max_tokens, as it was asked for.", times.max_tokens)
        yield histogram("vllm:request_num_preemptions", "Preemptions of a sequence.", times.num_preemptions)
        yield histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Tokens of a prompt that the cache did not have.",
            times.computed_prompt_length,
        )

    def _times(self) -> Iterator[Metric]:
        times, histogram = self.metrics.times, self._histogram
        yield histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", times.time_to_first_token
        )
        yield histogram(
            "vllm:inter_token_latency_seconds",
            "Between the steps that brought a sequence tokens.",
            times.inter_token_latency,
        )
        yield histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", times.time_per_token
        )
        yield histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", times.latency)
        yield histogram("vllm:request_queue_time_seconds", "From arrival to the first step.", times.queue_time)
        yield histogram(
            "vllm:request_prefill_time_seconds", "From the first step to the first token.", times.prefill_time
        )
        yield histogram("vllm:request_decode_time_seconds", "From the first token to the last.", times.decode_time)
        yield histogram(
            "vllm:request_inference_time_seconds", "From the first step to the last token.", times.inference_time
        )

    def _speculation(self) -> Iterator[Metric]:
        stats = self.metrics.speculation
        if stats is None:
            return
        yield self._counter("vllm:spec_decode_num_drafts", "Runs of drafts that were verified.", stats.num_runs)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Drafts that were verified.", stats.num_drafts)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Drafts that were accepted.", stats.num_accepted)
        by_place = {str(place): float(count) for place, count in enumerate(stats.accepted_at)}
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        yield self._counters(name, "Drafts accepted, by their place in a run.", "position", by_place)

    def _own(self) -> Iterator[Metric]:
        steps, offload = self.metrics.steps, self.metrics.offload
        if offload is not None:
            moves = {
                "device_to_host": offload.num_saved_blocks,
                "host_to_device": offload.num_loaded_blocks,
                "to_disk": offload.num_written_files,
                "from_disk": offload.num_loaded_files,
            }
            yield self._counters("nanoengine:kv_blocks_moved", "Blocks of K/V copied between tiers.", "way", moves)
            yield self._counter("nanoengine:kv_file_errors", "Files that could not be read.", offload.num_bad_files)
        seconds = {"prefill": steps.prefill_time, "decode": steps.decode_time}
        yield self._counters("nanoengine:step_seconds", "Time of steps, shared out by their tokens.", "phase", seconds)
