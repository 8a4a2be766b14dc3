"""Phi 3, 3.5 and 4 mini (Microsoft, 2024): Llama with fused tensors; some models rotate a part of each head, with LongRoPE."""

from __future__ import annotations

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import read_decoder
from nanoengine.models.families.windows import window_of
from nanoengine.models.model_config import ModelConfig, TensorNames

ARCHITECTURES = ("Phi3ForCausalLM",)


def read_config(fields: ConfigFields, _architecture: str) -> ModelConfig:
    for bias in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.expect(bias, False)
    fields.default(original_max_position_embeddings=4096)
    names = TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))
    config = read_decoder(fields, eps=1e-5, windows=(window_of(fields),), may_be_partial=True, names=names)
    rope = config.layers[0].rope
    if rope is not None and rope.kind not in ("default", "longrope"):
        raise fields.wrong("rope_type", rope.kind, "of this architecture, supported are 'default' and 'longrope'")
    return config
