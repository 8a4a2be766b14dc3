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
SIZES_OF: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Mixtral", "GptOss"), LOCAL_EXPERTS),
    "Qwen3Moe": EXPERTS,
    **{family: EXPERTS | {"shared_expert_intermediate_size": 16} for family in ("Qwen3Next", "Qwen3_5Moe")},
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "GraniteMoeHybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 4},
    "Llama4": {"num_hidden_layers": 8},
    "Gemma4": {"head_dim": 8, "vocab_size_per_layer_input": 50},
    "Gemma4Unified": {"head_dim": 8, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
}
"""Sizes of a small model, and what families have besides."""
