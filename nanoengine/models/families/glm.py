"""GLM-4 (Zhipu AI, 2024 and 2025): half of each head rotates, by pairs side by side; since 2025 there are norms behind parts."""

from __future__ import annotations

from dataclasses import replace

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import head_dim_of, read_decoder
from nanoengine.models.model_config import LayerConfig, ModelConfig, TensorNames
from nanoengine.models.rope_config import read_rope

NAMES = {
    "GlmForCausalLM": TensorNames(gate_up=("gate_up_proj",)),
    "Glm4ForCausalLM": TensorNames(
        gate_up=("gate_up_proj",),
        norm_after_attention="post_self_attn_layernorm",
        norm_after_mlp="post_mlp_layernorm",
    ),
}
ARCHITECTURES = tuple(NAMES)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    fields.default("partial_rotary_factor", 0.5)
    rope = replace(read_rope(fields, head_dim_of(fields, 128), may_be_partial=True), interleaved=True)
    return read_decoder(
        fields,
        architecture,
        head_dim=128,
        eps=1.5625e-7,
        layers=(LayerConfig(rope=rope),),
        qkv_bias=fields.flag("attention_bias", True),
        names=NAMES[architecture],
    )
