"""Metadata in the words of Hugging Face: what rotates how above all, and nothing that is said of a model goes unheeded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanoengine.errors import InvalidWeights, UnsupportedModel
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.gguf.translate import hf_config
from tests.models.gguf.written import write_file

NEEDED = {"block_count": 2, "context_length": 4096, "embedding_length": 256, "feed_forward_length": 512}
NEEDED |= {"attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5}
"""Heads have 64 dimensions, and so 32 frequencies."""

FACTORS = np.linspace(1, 8, 32, dtype=np.float32)
LONG_AND_SHORT = {"rope_factors_long.weight": FACTORS, "rope_factors_short.weight": FACTORS / 2}

Config = Callable[..., dict[str, Any]]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    def config(
        architecture: str = "llama",
        changes: dict[str, Any] | None = None,
        tensors: dict[str, np.ndarray] | None = None,
        **general: Any,
    ) -> dict[str, Any]:
        """The config of a file with all that is needed, and changes: keys of the architecture (None: without that key)."""
        keys = {f"{architecture}.{key}": value for key, value in (NEEDED | (changes or {})).items()}
        keys |= {key.replace("__", "."): value for key, value in general.items()}
        keys = {key: value for key, value in keys.items() if value is not None}
        tensors = {"token_embd.weight": np.zeros((10, 8), np.float32)} | (tensors or {})
        return hf_config(GGUFFile.open(write_file(tmp_path / "model.gguf", architecture, keys, tensors)))

    return config


def rope(config: Config, changes: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return config("llama", changes, **options)["rope_parameters"]


def test_defaults_are_those_of_llama_cpp(config: Config) -> None:
    expected = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32"}
    expected |= {"num_hidden_layers": 2, "max_position_embeddings": 4096, "hidden_size": 256, "intermediate_size": 512}
    expected |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-5}
    expected |= {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "vocab_size": 10,
        "eos_token_id": None,
    }
    assert config() == expected | {"tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False}


def test_tokens_and_tensors_say_the_rest(config: Config) -> None:
    tensors = {
        "output.weight": np.zeros((10, 8), np.float32),
        "blk.0.attn_output.bias": np.zeros(8, np.float32),
        "blk.0.ffn_up.bias": np.zeros(8, np.float32),
    }
    found = config(tensors=tensors, tokenizer__ggml__eos_token_id=4)
    expected = {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "eos_token_id": 4}
    assert expected.items() <= found.items()


# ---- rotation

YARN = {"beta_fast": 16.0, "beta_slow": 2.0, "ext_factor": 1.0}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, {"rope_type": "default"}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_attn_factor": 1.5}
            | {f"rope.scaling.yarn_{key}": value for key, value in YARN.items()},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
            | {"attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.5},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
            | {"mscale": 1.0, "mscale_all_dim": 0.5},
        ),
        ({"rope.dimension_count": 48}, {"rope_type": "default", "partial_rotary_factor": 0.75}),
        ({"rope.freq_base": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
    ],
)
def test_rotation(config: Config, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    assert rope(config, keys) == {"rope_theta": 10000.0} | expected


def test_a_part_of_a_head_is_what_transformers_makes_of_the_factor(config: Config) -> None:
    for size, rotated in [(128, 96), (176, 30), (208, 126), (304, 106)]:
        keys = {"attention.key_length": size, "attention.value_length": size, "rope.dimension_count": rotated}
        assert int(size * rope(config, keys)["partial_rotary_factor"]) == rotated


def test_long_and_short_factors(config: Config) -> None:
    keys = {"rope.scaling.original_context_length": 1024, "rope.scaling.attn_factor": 1.25}
    expected = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 1024}
    expected |= {"long_factor": FACTORS.tolist(), "short_factor": (FACTORS / 2).tolist(), "attention_factor": 1.25}
    assert config("phi3", keys, LONG_AND_SHORT)["rope_parameters"] == expected
    keys["rope.scaling.attn_factor"] = None
    assert "attention_factor" not in config("phi3", keys, LONG_AND_SHORT)["rope_parameters"]


def test_factors_of_all_lengths_come_before_those_of_long_and_short(config: Config) -> None:
    found = rope(config, tensors=LONG_AND_SHORT | {"rope_freqs.weight": FACTORS * 2})
    assert (found["rope_type"], found["factors"]) == ("factors", (FACTORS * 2).tolist())


def test_factors_divide_the_frequencies_as_those_of_llama_3_do(config: Config) -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    theirs = AutoConfig.for_model(
        "llama", head_dim=64, rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0} | llama3
    )
    wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    plain = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    found = rope(config, tensors={"rope_freqs.weight": (plain / wanted).numpy()})
    assert (found["rope_type"], found["rope_theta"]) == ("factors", 10000.0)
    torch.testing.assert_close(plain / torch.tensor(found["factors"]), wanted)


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({"rope.scaling.type": "longrope"}, {}, r"rope\.scaling\.type 'longrope'"),
        ({"rope.scaling.type": "dynamic"}, {}, r"rope\.scaling\.type 'dynamic'"),
        ({"rope.scaling.type": 3}, {}, r"rope\.scaling\.type 3; supported is text"),
        ({"rope.scaling.factor": 2.0}, {"rope_freqs.weight": FACTORS}, r"rope\.scaling\.factor 2\.0"),
        ({"rope.scaling.factor": 2.0}, LONG_AND_SHORT, r"rope\.scaling\.factor 2\.0"),
        ({}, {"rope_factors_long.weight": FACTORS}, "of both lengths"),
        ({"rope.scaling.attn_factor": 2.0}, {}, r"rope\.scaling\.attn_factor 2\.0"),
        ({"rope.dimension_count": 65}, {}, r"rope\.dimension_count 65"),
        ({"rope.dimension_count": 66}, {}, r"rope\.dimension_count 66"),
    ],
)
def test_other_rotations_are_refused_by_name(
    config: Config, keys: dict[str, Any], tensors: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        config(changes=keys, tensors=tensors)


@pytest.mark.parametrize(
    "factors", [FACTORS[:31], FACTORS.astype(np.float16), FACTORS - 1, FACTORS * np.nan, FACTORS * np.inf], ids=str
)
def test_factors_that_cannot_be_are_damage(config: Config, factors: np.ndarray) -> None:
    with pytest.raises(InvalidWeights, match=r"rope_freqs\.weight"):
        config(tensors={"rope_freqs.weight": factors})


# ---- architectures


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("granite", {"attention.scale": 0.0}, {"attention_multiplier": 64**-0.5}),
        ("granite", {"attention.scale": 0.5}, {"attention_multiplier": 0.5}),
        ("granite", {"rope.scaling.finetuned": True}, {}),
        ("llama", {"rope.scaling.finetuned": False, "attention.scale": 0.0}, {}),
        ("phi3", {"attention.sliding_window": 0}, {"sliding_window": None}),
        ("phi3", {"attention.sliding_window": 9}, {"sliding_window": 9}),
        ("gemma2", {"attn_logit_softcapping": 50.0}, {"attn_logit_softcapping": 50.0}),
        ("gemma2", {"final_logit_softcapping": 0.0}, {"final_logit_softcapping": None}),
        ("llama", {"attention.head_count_kv": [2, 2]}, {"num_key_value_heads": 2}),
    ],
    ids=str,
)
def test_what_is_off_or_left_out_is_what_llama_cpp_makes_of_it(
    config: Config, architecture: str, keys: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = config(architecture, keys)
    assert expected.items() <= found.items()
    assert ("attention_multiplier" in found) == (architecture == "granite")


GEMMA = {"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 9}


def test_gemma3_scales_the_layers_that_see_all(config: Config) -> None:
    keys = GEMMA | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1e6}
    found = config("gemma3", keys)
    assert found["architectures"] == ["Gemma3ForCausalLM"]
    assert (found["head_dim"], found["sliding_window"]) == (32, 9)
    assert found["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    own = config("gemma3", keys | {"rope.freq_base_swa": 2e4, "attention.sliding_window_pattern": 3})
    assert own["rope_parameters"]["sliding_attention"]["rope_theta"] == 2e4
    assert own["layer_types"] == ["sliding_attention", "sliding_attention"]


LFM2 = {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3}


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("llama", {}, "float16"),
        *((name, GEMMA, "bfloat16") for name in ("gemma2", "gemma3")),
        ("lfm2", LFM2, "bfloat16"),
    ],
)
def test_some_models_in_float16_are_computed_in_bfloat16(
    config: Config, architecture: str, keys: dict[str, Any], expected: str
) -> None:
    """The residual stream of Gemma leaves the range of float16; in float32, which holds it, they stay. Kernels of layers with
    states know float32 and bfloat16.
    """
    halves = {"token_embd.weight": np.zeros((10, 8), np.float16)}
    assert config(architecture, keys, halves)["dtype"] == expected
    assert config(architecture, keys)["dtype"] == "float32"


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_scores_by_the_hidden_size(config: Config, architecture: str, layers: int) -> None:
    assert config(architecture, GEMMA)["query_pre_attn_scalar"] == 32
    assert config(architecture, GEMMA | {"block_count": layers})["query_pre_attn_scalar"] == 256 // 4


def test_experts_must_be_as_many_as_the_tensors_have(config: Config) -> None:
    keys = {"expert_count": 4, "expert_used_count": 2}
    experts = {"blk.1.ffn_up_exps.weight": np.zeros((4, 2, 8), np.float32)}
    assert config("llama", keys, experts)["num_local_experts"] == 4
    with pytest.raises(InvalidWeights, match=r"blk\.1\.ffn_up_exps\.weight of 4 experts, but an expert_count of 3"):
        config("llama", keys | {"expert_count": 3}, experts)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gpt2", {}, "'gpt2'; supported are llama, llama4, .*gemma3, .*granitehybrid$"),
        ("llama with experts", {}, "'llama with experts'; supported"),
        ("llama", {"general.type": "adapter"}, "'adapter'; only a model"),
        ("llama", {"tokenizer.ggml.eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ("granite", {"rope.scaling.finetuned": False}, r"granite\.rope\.scaling\.finetuned False"),
        ("gemma3", GEMMA | {"attention.sliding_window": 0}, r"gemma3\.attention\.sliding_window"),
        ("gemma3", GEMMA | {"attention.sliding_window": None}, r"gemma3\.attention\.sliding_window"),
    ],
    ids=str,
)
def test_what_is_no_model_of_ours_is_refused(
    config: Config, architecture: str, changes: dict[str, Any], message: str
) -> None:
    general = {key: value for key, value in changes.items() if key.startswith(("general", "tokenizer"))}
    with pytest.raises(UnsupportedModel, match=message):
        config(architecture, {key: value for key, value in changes.items() if key not in general}, **general)


def test_a_file_without_an_embedding_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(InvalidWeights, match=r"no token_embd\.weight"):
        hf_config(
            GGUFFile(tmp_path, {"general.architecture": "llama"} | {f"llama.{k}": v for k, v in NEEDED.items()}, {}, [])
        )
