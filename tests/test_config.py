"""Options and model configs: both spellings are read, and what cannot work is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM
from nanoengine.config import EngineConfig, ModelConfig
from nanoengine.errors import InvalidConfig, UnknownOption, UnsupportedModel
from tests import support

QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in QWEN3_06B.items() if name not in names}


# ---- ModelConfig: the schemas


def test_qwen3_06b_in_the_schema_of_transformers_4() -> None:
    assert ModelConfig.from_hf(QWEN3_06B) == support.QWEN3_06B


def test_qwen3_06b_in_the_schema_of_transformers_5_is_the_same() -> None:
    config = without("rope_theta", "rope_scaling", "torch_dtype") | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
        "dtype": "bfloat16",
    }
    assert ModelConfig.from_hf(config) == ModelConfig.from_hf(QWEN3_06B)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500000, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 1e4},
        {"rope_parameters": None, "rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": None},
    ],
)
def test_rope_theta_is_found_in_every_spelling(rope: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(without("rope_theta", "rope_scaling") | rope).rope_theta == 5e5


@pytest.mark.parametrize("rope_type", ["yarn", "linear", "dynamic", "llama3", "longrope", "mrope"])
@pytest.mark.parametrize("table", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_other_rope_types_are_refused_by_name(rope_type: str, table: str, key: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"rope_type is '{rope_type}'"):
        ModelConfig.from_hf(QWEN3_06B | {table: {key: rope_type, "factor": 4.0, "rope_theta": 1e6}})


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_a_rope_scaling_that_is_not_computed_is_refused_beside_default_rope_parameters(key: str) -> None:
    """transformers reads rope_scaling instead of rope_parameters where both are there."""
    tables = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": {key: "yarn", "factor": 4.0},
    }
    with pytest.raises(UnsupportedModel, match="rope_type is 'yarn'"):
        ModelConfig.from_hf(QWEN3_06B | tables)


@pytest.mark.parametrize("theta", [0, -1.0, "1e6", True, float("inf"), float("nan"), [1e6]])
def test_a_rope_theta_that_is_no_positive_number_is_refused(theta: object) -> None:
    with pytest.raises(UnsupportedModel, match="rope_theta"):
        ModelConfig.from_hf(QWEN3_06B | {"rope_theta": theta})


@pytest.mark.parametrize("rope", ["yarn", [1], 7])
def test_rope_parameters_that_are_no_table_are_refused(rope: object) -> None:
    with pytest.raises(UnsupportedModel, match="rope_parameters"):
        ModelConfig.from_hf(QWEN3_06B | {"rope_parameters": rope})


def test_a_partial_rotation_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"partial_rotary_factor is 0\.5"):
        ModelConfig.from_hf(QWEN3_06B | {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}})


def test_rope_parameters_per_layer_type_are_refused() -> None:
    """Read as one table they would have no rope_theta, and the default would be a wrong one."""
    tables = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    with pytest.raises(UnsupportedModel, match="rope"):
        ModelConfig.from_hf(without("rope_theta") | {"rope_parameters": tables})


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("prefix", ["", "torch."])
def test_the_checkpoints_dtype_is_found_in_every_spelling(key: str, dtype: str, prefix: str) -> None:
    assert ModelConfig.from_hf(without("torch_dtype") | {key: prefix + dtype}).dtype == dtype


def test_without_a_dtype_it_is_float32() -> None:
    assert ModelConfig.from_hf(without("torch_dtype")).dtype == "float32"


def test_other_dtypes_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="float8_e4m3fn"):
        ModelConfig.from_hf(QWEN3_06B | {"torch_dtype": "float8_e4m3fn"})


# ---- ModelConfig: what is refused


@pytest.mark.parametrize(
    "architectures",
    [
        ["LlamaForCausalLM"],
        ["Qwen3MoeForCausalLM"],
        [],
        None,
        "Qwen3Model",
        "Qwen3ForCausalLM",
        {"Qwen3ForCausalLM": 1},
        [["Qwen3ForCausalLM"]],
        7,
        True,
    ],
    ids=str,
)
def test_other_architectures_are_refused_with_the_supported_ones(architectures: object) -> None:
    with pytest.raises(UnsupportedModel, match="supported are Qwen3ForCausalLM"):
        ModelConfig.from_hf(QWEN3_06B | {"architectures": architectures})


def test_a_config_without_architectures_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="architectures"):
        ModelConfig.from_hf({})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_sliding_window", True),
        ("quantization_config", {"quant_method": "fp8"}),
        ("quantization_config", {}),
        ("hidden_act", "gelu"),
    ],
)
def test_features_that_are_not_computed_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        ModelConfig.from_hf(QWEN3_06B | {key: value})


def test_a_sliding_window_that_is_not_used_is_no_matter() -> None:
    ModelConfig.from_hf(QWEN3_06B | {"sliding_window": 4096, "use_sliding_window": False})


@pytest.mark.parametrize("key", SIZES)
def test_a_missing_size_is_named(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{key} is None"):
        ModelConfig.from_hf(without(key))


@pytest.mark.parametrize("key", [*SIZES, "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, [8]])
def test_a_size_that_is_no_positive_integer_is_named(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        ModelConfig.from_hf(QWEN3_06B | {key: value})


@pytest.mark.parametrize("eps", ["small", None, [1]])
def test_a_norm_epsilon_that_is_no_number_is_named(eps: object) -> None:
    with pytest.raises(UnsupportedModel, match="rms_norm_eps"):
        ModelConfig.from_hf(QWEN3_06B | {"rms_norm_eps": eps})


@pytest.mark.parametrize("key", [*SIZES, "head_dim"])
def test_a_size_beyond_all_limits_is_named(key: str) -> None:
    for size in (10**11, 10**100):
        with pytest.raises(
            UnsupportedModel, match=rf"{key} is \d+.* in the model's config.json: it must be at most \d+"
        ):
            ModelConfig.from_hf(QWEN3_06B | {key: size})


def test_sizes_that_are_too_large_together_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"make \d+ weights: they must be at most \d+"):
        ModelConfig.from_hf(QWEN3_06B | {"hidden_size": 2**30, "intermediate_size": 2**30})


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_a_number_that_no_float_holds_is_named(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        ModelConfig.from_hf(QWEN3_06B | {key: 10**400})


def test_an_odd_head_dim_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="head_dim is 127"):
        ModelConfig.from_hf(QWEN3_06B | {"head_dim": 127})


def test_heads_that_do_not_share_evenly_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"num_attention_heads is 16.*num_key_value_heads \(3\)"):
        ModelConfig.from_hf(QWEN3_06B | {"num_key_value_heads": 3})


@pytest.mark.parametrize("config", [without("head_dim"), QWEN3_06B | {"head_dim": None}])
def test_without_a_head_dim_it_is_qwen3s_own_default(config: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(config | {"hidden_size": 512}).head_dim == 128


def test_keys_that_say_nothing_about_the_computation_are_no_matter() -> None:
    extra = {"auto_map": {"AutoModel": "modeling.Evil"}, "attention_dropout": 0.5, "anything": object()}
    assert ModelConfig.from_hf(QWEN3_06B | extra) == ModelConfig.from_hf(QWEN3_06B)


def test_parameters_of_qwen3_06b_are_the_published_number() -> None:
    config = ModelConfig.from_hf(QWEN3_06B)
    assert config.num_parameters() == 596_049_920
    assert ModelConfig.from_hf(QWEN3_06B | {"tie_word_embeddings": False}).num_parameters() == 751_632_384


# ---- EngineConfig


def test_the_defaults_are_valid() -> None:
    config = EngineConfig.from_options("demo", {})
    assert config == EngineConfig(model="demo")
    assert config.block_size == 16


@pytest.mark.parametrize(
    "name",
    [
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
        "tensor_parallel_size",
        "max_model_len",
        "num_kv_blocks",
        "kv_cache_memory",
        "num_threads",
        "long_prefill_token_threshold",
        "kv_host_memory",
        "kv_disk_bytes",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
def test_counts_must_be_positive_integers(name: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=rf"{name} is {value!r}: it must be a positive integer"):
        EngineConfig(model="demo", **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["max_num_seqs", "max_num_batched_tokens", "block_size", "tensor_parallel_size", "seed"]
)
def test_counts_without_a_default_meaning_may_not_be_none(name: str) -> None:
    with pytest.raises(InvalidConfig, match=name):
        EngineConfig(model="demo", **{name: None})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float64"),
        ("dtype", None),
        ("dtype", "int8"),
        ("preemption_mode", "swop"),
        ("kernels", "numpy"),
        ("kernels", "Native"),
        ("kernels", None),
        ("device", "tpu"),
        ("device", "CUDA"),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", -0.5),
        ("gpu_memory_utilization", float("nan")),
        ("gpu_memory_utilization", "0.9"),
        ("gpu_memory_utilization", None),
        ("enable_prefix_caching", 1),
        ("enable_prefix_caching", "yes"),
        ("enforce_eager", None),
        ("tensor_parallel_size", 2),
        ("scheduling_policy", "fcfs"),
        ("scheduling_policy", None),
        ("long_prefill_token_threshold", 0),
        ("long_prefill_token_threshold", 1.5),
        ("device", "cuda:\u0661"),
        ("async_scheduling", "yes"),
        ("tokenizer", 7),
        ("model", 7),
        ("seed", 1.5),
        ("seed", "7"),
        ("seed", True),
        ("kv_disk_path", 7),
        ("kv_disk_bytes", 0),
        ("kv_host_memory", 0),
        ("kv_host_memory", "4G"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_field_and_value(name: str, value: object) -> None:
    with pytest.raises(InvalidConfig) as raised:
        EngineConfig(**{"model": "demo", name: value})  # type: ignore[arg-type]
    assert name in str(raised.value)
    assert str(value) in str(raised.value)


LIMITS = {
    "max_model_len": 2**24,
    "max_num_seqs": 2**16,
    "max_num_batched_tokens": 2**20,
    "long_prefill_token_threshold": 2**20,
    "block_size": 2**16,
    "num_kv_blocks": 2**31 - 2,
    "kv_cache_memory": 2**50,
    "kv_host_memory": 2**50,
    "kv_disk_bytes": 2**60,
    "num_threads": 1024,
}


@pytest.mark.parametrize(("name", "limit"), LIMITS.items(), ids=LIMITS)
def test_counts_are_limited_to_what_the_layers_below_can_hold(name: str, limit: int) -> None:
    EngineConfig(model="demo", **{name: limit})  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match=f"{name} is {limit + 1}: it must be at most {limit}; lower it"):
        EngineConfig(model="demo", **{name: limit + 1})  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match=f"{name} is a number of 33220 bits"):
        EngineConfig(model="demo", **{name: 10**10_000})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [2**64, 2**70, -(2**63) - 1, 10**10_000], ids=lambda seed: f"{seed.bit_length()} bits")
def test_a_seed_has_64_bits_like_that_of_a_request(seed: int) -> None:
    with pytest.raises(
        InvalidConfig, match=r"seed is .*at least -9223372036854775808 and at most 18446744073709551615"
    ):
        EngineConfig(model="demo", seed=seed)


def test_a_value_is_shown_in_a_line_whatever_it_is() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, "x" * 10**6, -(10**10_000), dict.fromkeys(range(1000), deep), float("nan")):
        with pytest.raises(InvalidConfig, match="dtype is ") as raised:
            EngineConfig(model="demo", dtype=value)  # type: ignore[arg-type]
        assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    "tiers", [{}, {"preemption_mode": "swap"}, {"kv_host_memory": 9}, {"kv_disk_path": "x"}], ids=str
)
@pytest.mark.parametrize("wanted", [True, False, None])
def test_steps_may_overlap_with_all_tiers(tiers: dict[str, Any], wanted: bool | None) -> None:
    assert EngineConfig(model="demo", async_scheduling=wanted, **tiers).async_scheduling is wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float16"),
        ("kernels", "auto"),
        ("kernels", "native"),
        ("kernels", "torch"),
        ("num_threads", None),
        ("num_threads", 3),
        ("scheduling_policy", "prefill_first"),
        ("scheduling_policy", "mixed"),
        ("long_prefill_token_threshold", None),
        ("long_prefill_token_threshold", 512),
        ("tokenizer", Path("some/folder")),
        ("device", "cuda:1"),
        ("gpu_memory_utilization", 1),
        ("gpu_memory_utilization", 0.01),
        ("max_model_len", None),
        ("max_model_len", 4096),
        ("block_size", 256),
        ("seed", -3),
        ("seed", 2**64 - 1),
        ("seed", -(2**63)),
    ],
)
def test_a_value_that_works_is_kept(name: str, value: object) -> None:
    assert getattr(EngineConfig.from_options("demo", {name: value}), name) == value


def test_two_sizes_of_the_pool_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="num_kv_blocks and kv_cache_memory"):
        EngineConfig(model="demo", num_kv_blocks=4, kv_cache_memory=1 << 20)


@pytest.mark.parametrize(
    "options", [{"preemption_mode": "swap"}, {"preemption_mode": "auto"}, {"kv_host_memory": 9}, {"kv_disk_path": "x"}]
)
def test_tiers_need_the_prefix_cache(options: dict[str, Any]) -> None:
    EngineConfig(model="demo", **options)
    with pytest.raises(InvalidConfig, match="enable_prefix_caching is False"):
        EngineConfig(model="demo", enable_prefix_caching=False, **options)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_num_sequences", "max_num_seqs"),
        ("max_model_length", "max_model_len"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("num_gpu_blocks", "num_kv_blocks"),
        ("enable_prefix_cache", "enable_prefix_caching"),
    ],
)
def test_an_unknown_option_is_refused_and_the_nearest_is_suggested(name: str, nearest: str) -> None:
    with pytest.raises(UnknownOption, match=f"'{name}': did you mean '{nearest}'"):
        LLM("demo", **{name: 4})


def test_an_unknown_option_that_is_like_none_gets_the_list() -> None:
    with pytest.raises(UnknownOption, match=r"'zzz': the options are .*max_num_seqs.*seed"):
        LLM("demo", zzz=1)


def test_errors_about_options_are_also_what_python_programs_expect() -> None:
    with pytest.raises(TypeError):
        LLM("demo", zzz=1)
    with pytest.raises(ValueError):
        LLM("demo", block_size=0)


def test_a_config_does_not_change() -> None:
    with pytest.raises(AttributeError):
        EngineConfig(model="demo").block_size = 4  # type: ignore[misc]
