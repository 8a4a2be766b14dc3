"""The text of `GET /metrics`, read back by Prometheus' own parser.

The families and bounds below are all that vLLM's Grafana dashboards ask for, and the EXPECTED_METRICS_V1 of its tests (0.33).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from nanoengine.features.kv_offload.offload import OffloadStats
from nanoengine.features.speculation.statistics import SpeculationStats
from nanoengine.serve.server.metrics import CONTENT_TYPE, render_metrics
from tests.core.toys import run
from tests.features.observability.toys import Observed

LATENCY = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
FIRST = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75]
FIRST += [1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560]
BETWEEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
STEP = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
LENGTH = [1, 2, 5, 10, 20, 50]  # of at most 64 tokens

HISTOGRAMS: dict[str, list[float]] = {
    "vllm:time_to_first_token_seconds": FIRST,
    **dict.fromkeys(("vllm:inter_token_latency_seconds", "vllm:request_time_per_output_token_seconds"), BETWEEN),
    "vllm:e2e_request_latency_seconds": LATENCY,
    **{f"vllm:request_{phase}_time_seconds": LATENCY for phase in ("queue", "prefill", "decode", "inference")},
    "vllm:iteration_tokens_total": STEP,
    **{f"vllm:request_{kind}_tokens": LENGTH for kind in ("prompt", "generation", "max_num_generation")},
    **dict.fromkeys(("vllm:request_params_max_tokens", "vllm:request_prefill_kv_computed_tokens"), LENGTH),
    "vllm:request_params_n": [1, 2, 5, 10, 20],
    "vllm:request_num_preemptions": [1, 2, 3, 4, 5, 10, 20],
}
GAUGES = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
COUNTERS = {"vllm:num_preemptions", "vllm:prompt_tokens", "vllm:prompt_tokens_cached", "vllm:generation_tokens"}
COUNTERS |= {"vllm:prefix_cache_queries", "vllm:prefix_cache_hits"}  # a sample has "_total" behind it
LABELLED = {
    "vllm:request_success": ("finished_reason", ["stop", "length", "abort", "error", "repetition"]),
    "vllm:num_requests_waiting_by_reason": ("reason", ["capacity", "deferred"]),
    "vllm:admission_rejections": ("reason", ["max_num_queued_reqs", "max_num_queued_tokens"]),
    "vllm:prompt_tokens_by_source": ("source", ["local_compute", "local_cache_hit", "external_kv_transfer"]),
}


def text_of(observed: Observed | None = None, num_rejected: Mapping[str, int] | None = None, **options: Any) -> str:
    metrics = (observed or Observed(max_model_len=64)).snapshot()
    options = {"model_name": "demo", "cache_config": {"cache_dtype": "auto"}} | options
    return render_metrics({"0": metrics}, num_rejected=num_rejected or {}, **options).decode()


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def check(observed: Observed, expected: Mapping[str, float]) -> None:
    """Some series have these values; labels are written behind their names."""
    found = {}
    for family in text_string_to_metric_families(text_of(observed)):
        for sample in family.samples:
            labels = [f"{key}={value}" for key, value in sample.labels.items() if key not in ("model_name", "engine")]
            key = " ".join([sample.name, *labels])
            assert key not in found, "no series comes twice"
            found[key] = sample.value
    assert {key: found[key] for key in expected} == expected


def test_histograms_have_vllms_bounds() -> None:
    found = families(text_of())
    for name, bounds in HISTOGRAMS.items():
        assert found[name].type == "histogram"
        buckets = [sample for sample in found[name].samples if sample.name == f"{name}_bucket"]
        assert [float(sample.labels["le"]) for sample in buckets] == [*bounds, math.inf]
        assert {tuple(sample.labels) for sample in buckets} == {("engine", "le", "model_name")}


def test_bounds_are_written_as_prometheus_writes_them() -> None:
    text = text_of(Observed(max_model_len=2**21))
    assert 'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="demo"} 0' in text
    for bound in ("1.0", "1e+06", "+Inf"):
        assert f'vllm:request_prompt_tokens_bucket{{engine="0",le="{bound}",model_name="demo"}} 0' in text


def test_other_families_have_vllms_types_and_labels_from_the_start() -> None:
    found = families(text_of())
    for name in (*GAUGES, *COUNTERS, *LABELLED):
        is_gauge = name in GAUGES or "waiting" in name
        label, values = LABELLED.get(name, ("engine", ["0"]))
        assert found[name].type == ("gauge" if is_gauge else "counter")
        assert [sample.labels[label] for sample in found[name].samples] == values
        for sample in found[name].samples:
            assert sample.name == name + "_total" * (not is_gauge)
            of_engine = {} if name == "vllm:admission_rejections" else {"engine": "0"}
            assert sample.labels == {"model_name": "demo", **of_engine, label: sample.labels[label]}


def test_the_values_are_those_of_the_engine() -> None:
    observed = Observed()
    for _ in range(2):  # equal prompts: the completions of one, and the other request, find its two full blocks
        observed.add(list(range(10)), 3, n=2)
    run(observed.engine, [])
    observed.engine.abort(observed.add([1, 2]).request_id)
    # A step for the first prompt, one for the rest of the others, two for the other tokens of all.
    check(
        observed,
        {
            "vllm:request_success_total finished_reason=length": 4,
            "vllm:request_success_total finished_reason=abort": 1,
            "vllm:prompt_tokens_total": 40,
            "vllm:prompt_tokens_by_source_total source=local_compute": 10 + 3 * 2,
            "vllm:prompt_tokens_by_source_total source=local_cache_hit": 3 * 8,
            "vllm:prompt_tokens_cached_total": 3 * 8,
            "vllm:generation_tokens_total": 12,
            "vllm:prefix_cache_queries_total": 40,
            "vllm:prefix_cache_hits_total": 3 * 8,
            "vllm:time_to_first_token_seconds_count": 4,
            "vllm:time_to_first_token_seconds_sum": 0.25 + 3 * 0.5,
            "vllm:time_to_first_token_seconds_bucket le=0.1": 0,
            "vllm:time_to_first_token_seconds_bucket le=0.25": 1,
            "vllm:time_to_first_token_seconds_bucket le=+Inf": 4,
            "vllm:inter_token_latency_seconds_count": 8,
            "vllm:e2e_request_latency_seconds_sum": 4 * 1.0,
            "vllm:request_queue_time_seconds_sum": 3 * 0.25,
            "vllm:request_prefill_time_seconds_sum": 4 * 0.25,
            "vllm:request_decode_time_seconds_sum": 0.75 + 3 * 0.5,
            "vllm:request_params_max_tokens_sum": 12,
            "vllm:iteration_tokens_total_sum": 16 + 12,
            "vllm:iteration_tokens_total_count": 4,
            "nanoengine:step_seconds_total phase=prefill": 0.5,
            "nanoengine:step_seconds_total phase=decode": 0.5,
        },
    )


def test_gauges_are_those_of_the_moment() -> None:
    observed = Observed(max_num_seqs=1, num_blocks=16)
    for i in range(3):
        observed.add([i] * 4, 3)
    observed.engine.step()
    for num_fetching in (0, 1):
        observed.sources["fetching"] = lambda count=num_fetching: observed.engine.scheduler.waiting[:count]
        expected = {
            "vllm:num_requests_running": 1,
            "vllm:num_requests_waiting": 2,
            "vllm:num_requests_waiting_by_reason reason=capacity": 2 - num_fetching,
            "vllm:num_requests_waiting_by_reason reason=deferred": num_fetching,
            "vllm:kv_cache_usage_perc": 2 / 16,
        }
        check(observed, expected)
    run(observed.engine, [])
    check(observed, dict.fromkeys(GAUGES, 0))


def test_preemptions_drafts_and_blocks_that_move_are_counted() -> None:
    observed = Observed(num_blocks=4, max_model_len=16)
    for i in (1, 2):
        observed.add([i] * 6, 9)
    run(observed.engine, [])
    assert "spec_decode" not in text_of(observed)
    assert "nanoengine:kv_" not in text_of(observed)
    drafts = SpeculationStats()
    for num_accepted in (3, 1):
        drafts.record(3, num_accepted)
    blocks = OffloadStats(
        num_saved_blocks=1, num_loaded_blocks=2, num_written_files=3, num_loaded_files=4, num_bad_files=5
    )
    observed.sources |= {"speculation": lambda: drafts, "offload": lambda: blocks}
    ways = ("device_to_host", "host_to_device", "to_disk", "from_disk")
    accepted = "vllm:spec_decode_num_accepted_tokens"
    check(
        observed,
        {
            "vllm:num_preemptions_total": 1,
            "vllm:request_num_preemptions_sum": 1,
            "vllm:spec_decode_num_drafts_total": 2,
            "vllm:spec_decode_num_draft_tokens_total": 6,
            f"{accepted}_total": 4,
            **{f"{accepted}_per_pos_total position={place}": count for place, count in enumerate((2, 1, 1))},
            **{f"nanoengine:kv_blocks_moved_total way={way}": count for count, way in enumerate(ways, 1)},
            "nanoengine:kv_file_errors_total": 5,
        },
    )


def test_rejections_are_counted_by_reason_and_belong_to_no_engine() -> None:
    text = text_of(None, {"max_num_queued_reqs": 3, "draining": 1})
    samples = families(text)["vllm:admission_rejections"].samples
    assert [(sample.labels, sample.value) for sample in samples] == [
        ({"model_name": "demo", "reason": reason}, count)
        for reason, count in (("max_num_queued_reqs", 3), ("max_num_queued_tokens", 0), ("draining", 1))
    ]


def test_the_options_of_the_cache_are_labels_and_names_of_models_are_escaped() -> None:
    options, name = {"cache_dtype": "int8", "enable_prefix_caching": "True"}, 'my "own"\\\nmodel é'
    found = families(text_of(Observed(num_blocks=24, max_model_len=64), cache_config=options, model_name=name))
    [sample] = found["vllm:cache_config_info"].samples
    assert sample.value == 1
    sizes = {"block_size": "4", "num_gpu_blocks": "24", "kv_cache_size_tokens": "96", "kv_cache_max_concurrency": "1.5"}
    assert sample.labels == {**options, **sizes, "engine": "0"}
    assert found["vllm:num_requests_running"].samples[0].labels["model_name"] == name


def test_the_process_is_told_of_and_nothing_global_is_touched() -> None:
    before = {family.name for family in REGISTRY.collect()}
    found = families(text_of())
    assert {family.name for family in REGISTRY.collect()} == before
    if Path("/proc/self/stat").exists():
        assert found["process_resident_memory_bytes"].samples[0].value > 2**20
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")
