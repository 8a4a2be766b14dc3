"""A config.json as it stands in a well-known repository, and parts of it."""

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


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in QWEN3_06B.items() if name not in names}


VERSION_5 = without("rope_theta", "rope_scaling", "torch_dtype") | {"dtype": "bfloat16"}
VERSION_5 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}}
"""The same in the schema of transformers 5."""
