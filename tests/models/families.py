"""Tiny random models of every family, as transformers makes them, in the variations that their configs allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support import TINY, save_random

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 9.0],
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, other ends": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 0.9,
        "truncate": False,
    },
    "yarn, two amplitudes": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
}


def rope(name: str, theta: float = 10_000.0) -> dict[str, Any]:
    return {"rope_parameters": ROPES[name] | {"rope_theta": theta}}


def partial(fraction: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": fraction}}


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {"head_dim": 16}),
    "Llama, untied, odd heads": (
        "Llama",
        {"tie_word_embeddings": False, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
    ),
    "Llama, no groups, odd sizes": (
        "Llama",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": None,
            "hidden_size": 39,
            "head_dim": 10,
            "intermediate_size": 53,
        },
    ),
    "Llama, all biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "Phi3, half rotated": (
        "Phi3",
        {"original_max_position_embeddings": 512, "num_attention_heads": 3, "num_key_value_heads": 1} | partial(0.5),
    ),
    "SmolLM2's shape": (
        "Llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 32, "rms_norm_eps": 1e-5},
    ),
    **{
        f"Llama, rope {name}": ("Llama", {"head_dim": 16, "max_position_embeddings": 256} | rope(name))
        for name in ROPES
    },
    "Mistral, no window": ("Mistral", {"sliding_window": None, "head_dim": 20}),
    "Mistral, a wide window": ("Mistral", {"sliding_window": 512, "head_dim": 32, "tie_word_embeddings": False}),
    "Qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "Qwen2, tied, 7 heads": ("Qwen2", {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1}),
    "Qwen3, yarn": ("Qwen3", {"head_dim": 32} | rope("yarn", 1e6)),
    "SmolLM3": ("SmolLM3", {"num_hidden_layers": 5, "head_dim": 16}),
    "SmolLM3, others without rotation": (
        "SmolLM3",
        {"num_hidden_layers": 3, "head_dim": 32, "no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True},
    ),
    "Phi3": ("Phi3", {"original_max_position_embeddings": 512, "tie_word_embeddings": False}),
    "Phi3, partial, long factors": (
        "Phi3",
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "original_max_position_embeddings": 40}
        | {"rope_parameters": LONGROPE | {"rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "Phi3, partial, short factors": (
        "Phi3",
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "original_max_position_embeddings": 256}
        | {"rope_parameters": LONGROPE | {"rope_theta": 1e4, "partial_rotary_factor": 0.75}, "tests_max_len": 256},
    ),
    "Granite": (
        "Granite",
        {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "head_dim": 16,
        },
    ),
    "Granite, biases": ("Granite", {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.3}),
    "OLMo2": ("Olmo2", {"tie_word_embeddings": False}),
    "OLMo2, biases, no groups": ("Olmo2", {"attention_bias": True, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "Mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    "Mixtral, one of one": ("Mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1, "intermediate_size": 36}),
    "Qwen3-MoE": ("Qwen3Moe", {"head_dim": 32, "attention_bias": True} | EXPERTS),
    "Qwen3-MoE, some layers dense": (
        "Qwen3Moe",
        {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3], "head_dim": 16}
        | EXPERTS
        | {"norm_topk_prob": False, "num_experts_per_tok": 1},
    ),
    "Qwen3-MoE, all chosen": ("Qwen3Moe", {"head_dim": 32} | EXPERTS | {"num_experts_per_tok": 6}),
    # Windows below, at and beyond a block of 16, prompts of 40 and 57, and all of 75 tokens; full layers first, last, none.
    "Mistral, a window": ("Mistral", {"sliding_window": 13, "head_dim": 16}),
    "Mistral, a window of the token alone": ("Mistral", {"sliding_window": 1, "head_dim": 16}),
    "Mixtral, a window": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40, "head_dim": 16},
    ),
    "Phi3, a window of a block": (
        "Phi3",
        {
            "original_max_position_embeddings": 512,
            "sliding_window": 16,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        }
        | partial(0.5),
    ),
    "Qwen2, the first full": (
        "Qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 20},
    ),
    "Qwen3, the last full": (
        "Qwen3",
        {"num_hidden_layers": 3, "head_dim": 16, "use_sliding_window": True, "sliding_window": 33}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "Qwen3, a window of all but one": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "max_window_layers": 0, "sliding_window": 74},
    ),
    "Qwen3-MoE, a window": (
        "Qwen3Moe",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 17} | EXPERTS,
    ),
    "SmolLM3, windows where nothing rotates": (
        "SmolLM3",
        {"num_hidden_layers": 4, "head_dim": 16, "use_sliding_window": True, "sliding_window": 10}
        | {"no_rope_layers": [0, 1, 1, 0]},
    ),
    "OLMo3, windows": ("Olmo3", {"num_hidden_layers": 5, "sliding_window": 9}),
    "Gemma2": (
        "Gemma2",
        {"num_hidden_layers": 3, "head_dim": 32, "sliding_window": 11, "query_pre_attn_scalar": 24}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "Gemma2, no caps, biases": (
        "Gemma2",
        {"head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}
        | {"sliding_window": 50, "tie_word_embeddings": False},
    ),
    "Gemma3": (
        "Gemma3",
        {"num_hidden_layers": 7, "head_dim": 32, "sliding_window": 20, "query_pre_attn_scalar": 20}
        | {"rope_parameters": {"full_attention": ROPES["linear"], "sliding_attention": {"rope_type": "default"}}},
    ),
    "Gemma3, a cap, odd sizes, no full layer": (
        "Gemma3",
        {"head_dim": 10, "intermediate_size": 53, "sliding_window": 5, "final_logit_softcapping": 6.0},
    ),
    "gpt-oss": (
        "GptOss",
        {"num_hidden_layers": 3, "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 18}
        | {"intermediate_size": 36},
    ),
    "gpt-oss, full layers, no biases": (
        "GptOss",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 4, "layer_types": ["full_attention"] * 2}
        | {"attention_bias": False, "tie_word_embeddings": False, "swiglu_limit": 7.0},
    ),
    "OLMo3, yarn where all is seen": (
        "Olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 600,
            "rope_parameters": {
                "full_attention": ROPES["yarn"] | {"rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
}


def family_checkpoint(folder: Path, shape: str, seed: int = 0, **overrides: Any) -> Path:
    """A random checkpoint of the shape of that name."""
    family, options = SHAPES[shape]
    torch.manual_seed(seed)
    # Families choose what TINY does not: rotations and heads.
    merged = {
        key: value for key, value in TINY.items() if key not in ("rope_theta", "head_dim", "attention_bias")
    } | options
    merged |= {"dtype": "float32", "pad_token_id": None} | overrides
    merged.pop("tests_max_len", None)
    model = getattr(transformers, f"{family}ForCausalLM")
    return save_random(model(model.config_class(**merged)).eval(), folder)
