"""What a config.json may hold: values of the wrong kind or size and fields that are not known are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine.errors import UnsupportedModel
from nanoengine.models.architectures import read_model_config
from nanoengine.models.model_config import ModelConfig
from tests.models.configs import QWEN3_06B, without

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "mxfp4"}),
        ("quantization_config", {}),
        ("hidden_act", "gelu"),
    ],
)
def test_features_that_are_not_computed_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        read_model_config(QWEN3_06B | {key: value})


def test_a_sliding_window_counts_where_it_is_used() -> None:
    unused = read_model_config(QWEN3_06B | {"sliding_window": 4096, "use_sliding_window": False})
    assert windows_of(unused) == [None] * 28
    used = QWEN3_06B | {"sliding_window": 4096, "use_sliding_window": True}
    assert windows_of(read_model_config(used)) == [None] * 28, "the first max_window_layers have none"
    assert windows_of(read_model_config(used | {"max_window_layers": 20})) == [None] * 20 + [4096] * 8


def windows_of(config: ModelConfig) -> list[int | None]:
    return [config.layer(i).window for i in range(config.num_layers)]


@pytest.mark.parametrize("key", SIZES)
def test_a_missing_size_is_named(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{key} is None"):
        read_model_config(without(key))


@pytest.mark.parametrize("key", [*SIZES, "num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, [8]])
def test_a_size_that_is_no_positive_integer_is_named(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        read_model_config(QWEN3_06B | {key: value})


@pytest.mark.parametrize("eps", ["small", None, [1]])
def test_a_norm_epsilon_that_is_no_number_is_named(eps: object) -> None:
    with pytest.raises(UnsupportedModel, match="rms_norm_eps"):
        read_model_config(QWEN3_06B | {"rms_norm_eps": eps})


@pytest.mark.parametrize("key", [*SIZES, "num_key_value_heads", "head_dim"])
def test_a_size_beyond_all_limits_is_named(key: str) -> None:
    for size in (10**11, 10**100):
        with pytest.raises(
            UnsupportedModel, match=rf"{key} is \d+.* in the model's config.json: it must be at most \d+"
        ):
            read_model_config(QWEN3_06B | {key: size})


def test_sizes_that_are_too_large_together_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"make \d+ weights: they must be at most \d+"):
        read_model_config(QWEN3_06B | {"hidden_size": 2**30, "intermediate_size": 2**30})


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_a_number_that_no_float_holds_is_named(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        read_model_config(QWEN3_06B | {key: 10**400})


def test_an_odd_head_dim_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="head_dim is 127"):
        read_model_config(QWEN3_06B | {"head_dim": 127})


def test_heads_that_do_not_share_evenly_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"num_attention_heads is 16.*num_key_value_heads \(3\)"):
        read_model_config(QWEN3_06B | {"num_key_value_heads": 3})


@pytest.mark.parametrize("config", [without("head_dim"), QWEN3_06B | {"head_dim": None}])
def test_without_a_head_dim_it_is_qwen3s_own_default(config: dict[str, Any]) -> None:
    assert read_model_config(config | {"hidden_size": 512}).head_dim == 128


INERT = {
    "auto_map": {"AutoModel": "modeling.Evil"},
    "attention_dropout": 0.5,
    "_name_or_path": object(),
    "max_length": 20,
}


@pytest.mark.parametrize("off", [None, False, 0, 0.0, "", [], {}], ids=str)
def test_keys_that_say_nothing_about_the_computation_are_no_matter(off: object) -> None:
    assert read_model_config(QWEN3_06B | INERT | {"some_feature": off}) == read_model_config(QWEN3_06B)


@pytest.mark.parametrize("value", [True, 30.0, "yes", [1], {"a": 1}], ids=str)
@pytest.mark.parametrize("key", ["attn_logit_softcapping", "embedding_multiplier", "mlp_bias", "some_feature"])
def test_a_field_that_nobody_knows_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{key}' is .*: this field is not known.*take it out"):
        read_model_config(QWEN3_06B | {key: value})


def test_a_field_that_another_family_has_is_refused_by_name() -> None:
    """Read by nobody, it would be ignored."""
    llama = QWEN3_06B | {"architectures": ["LlamaForCausalLM"], "residual_multiplier": 0.22}
    with pytest.raises(UnsupportedModel, match="residual_multiplier"):
        read_model_config(llama)


def test_parameters_of_qwen3_06b_are_the_published_number() -> None:
    config = read_model_config(QWEN3_06B)
    assert config.num_parameters() == 596_049_920
    assert read_model_config(QWEN3_06B | {"tie_word_embeddings": False}).num_parameters() == 751_632_384
