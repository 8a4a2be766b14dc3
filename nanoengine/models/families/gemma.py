"""Gemma 2 and 3, text (Google DeepMind, 2024 and 2025): norms before and after each part, GeGLU, and windows in most layers."""

from __future__ import annotations

from typing import Any

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import biases_of, head_dim_of, read_decoder
from nanoengine.models.families.windows import layers_by_types, types_by_pattern, window_of
from nanoengine.models.model_config import ModelConfig, TensorNames
from nanoengine.models.rope_config import LAYER_TYPES, read_rope, read_ropes

MULTIMODAL = "Gemma3ForConditionalGeneration"
ARCHITECTURES = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", MULTIMODAL)
DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
"""Defaults of multimodal models: their files omit fields that equal those of the smallest model."""

HEAD_DIM = 256
NAMES = TensorNames(
    norm_after_attention="post_attention_layernorm",
    norm_before_mlp="pre_feedforward_layernorm",
    norm_after_mlp="post_feedforward_layernorm",
)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    fields.expect("use_bidirectional_attention", False)
    fields.ignore("hidden_act")  # files of Gemma 2 have it beside `hidden_activation`, without effect
    size = head_dim_of(fields, HEAD_DIM)
    facts: dict[str, Any]
    if architecture == MULTIMODAL:
        fields.default(**DEFAULTS)
    if architecture != "Gemma2ForCausalLM":
        fields.ignore("_sliding_window_pattern")  # layer_types repeats it
        types = types_by_pattern(fields, fields.integer("sliding_window_pattern", 6))
        ropes = read_ropes(fields, size, 1e6, local_theta=1e4)
        facts = {"qk_norm": "head", "positions_are_scaled": True}
    else:
        types = types_by_pattern(fields, 2)
        ropes = dict.fromkeys(LAYER_TYPES, read_rope(fields, size, 1e4))
        facts = {"attention_soft_cap": fields.nullable("attn_logit_softcapping", 50.0, fields.number)}
    return read_decoder(
        fields,
        head_dim=HEAD_DIM,
        layers=layers_by_types(types, ropes, window_of(fields, 4096)),
        norm_offset=1.0,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        names=NAMES,
        **common_facts(fields, 30.0 if architecture == "Gemma2ForCausalLM" else None),
        **facts,
    )


def common_facts(fields: ConfigFields, logits_soft_cap: float | None = None) -> dict[str, Any]:
    """Facts of a `ModelConfig` that Gemma 2, 3 and 4 have in common; `logits_soft_cap`: its default."""
    fields.expect("hidden_activation", "gelu_pytorch_tanh")
    return biases_of(fields) | {
        "activation": "gelu_tanh",
        "tied": True,
        "embedding_scale": fields.integer("hidden_size") ** 0.5,
        "embedding_scale_is_rounded": True,
        "logits_soft_cap": fields.nullable("final_logit_softcapping", logits_soft_cap, fields.number),
    }
