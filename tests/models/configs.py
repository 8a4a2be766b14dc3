"""Published configs, one of them in two schemas, and sizes of small models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "published"
PUBLISHED: list[dict[str, Any]] = json.loads((FOLDER / "configs.json").read_text())
"""Configs of public repositories, with the reason of their refusal where they are refused."""

QWEN3_06B: dict[str, Any] = PUBLISHED[0]["config"]


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
