"""A config.json as it stands in a well-known repository, parts of it, and sizes of small models."""

from __future__ import annotations

from typing import Any

QWEN3_06B: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0}
QWEN3_06B |= {"bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu"}
QWEN3_06B |= {"hidden_size": 1024}
QWEN3_06B |= {"initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960}
QWEN3_06B |= {"max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28}
QWEN3_06B |= {"num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000}
QWEN3_06B |= {"sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True}
QWEN3_06B |= {"transformers_version": "4.51.0", "use_sliding_window": False, "vocab_size": 151936}


def without(*names: str, of: dict[str, Any] = QWEN3_06B) -> dict[str, Any]:
    return {name: value for name, value in of.items() if name not in names}


VERSION_5 = without("rope_theta", "rope_scaling", "torch_dtype") | {"dtype": "bfloat16"}
VERSION_5 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}}
"""The same in the schema of transformers 5."""

SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROWING = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 2048}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
SIZES_OF: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Mixtral", "GptOss", "GraniteMoe", "MiniMaxM2"), LOCAL_EXPERTS),
    "Qwen3Moe": EXPERTS,
    **{family: EXPERTS | {"shared_expert_intermediate_size": 16} for family in ("Qwen3Next", "Qwen3_5Moe")},
    "GraniteMoeShared": LOCAL_EXPERTS | {"shared_intermediate_size": 16},
    "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "Glm4Moe": ROUTED | {"n_routed_experts": 4},
    "Dots1": ROUTED | {"n_routed_experts": 4, "n_shared_experts": 1},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "Lfm2Moe": EXPERTS | {"layer_types": ["conv", "full_attention"] * 2},
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "GraniteMoeHybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 4},
    "Bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4},
    "FalconH1": {"mamba_d_ssm": 24, "mamba_n_heads": 3},
    "NemotronH": {"hybrid_override_pattern": "M*-M", "head_dim": 8},
    "Llama4": {"num_hidden_layers": 8},
    "Gemma4": {"head_dim": 8, "vocab_size_per_layer_input": 50},
    "Gemma4Unified": {"head_dim": 8, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "HunYuanDenseV1": {"head_dim": 8},
    "Ministral3": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0} | GROWING},
}
"""Sizes of a small model, and what families have besides."""

PUBLISHED: list[dict[str, Any]] = [
    {"architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 256, "boi_token_index": 255999}
    | {
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
        | {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    }
    | {"eoi_token_index": 256000, "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"}},
    {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_size": 2048, "intermediate_size": 11008}
    | {"max_position_embeddings": 128000, "max_window_layers": 70, "num_attention_heads": 16, "num_hidden_layers": 36}
    | {"num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768}
    | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "tie_word_embeddings": True}
    | {"use_sliding_window": False, "vision_config": {"hidden_size": 1280}, "vocab_size": 151936},
    {"architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_out_bias": False, "head_dim": 128}
    | {"hidden_size": 5120, "intermediate_size": 27648, "max_position_embeddings": 524288, "mlp_bias": False}
    | {"num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8, "residual_dropout": 0.1}
    | {"rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "vocab_size": 155136},
]
"""What config.json of well-known repositories say, and leave out."""
