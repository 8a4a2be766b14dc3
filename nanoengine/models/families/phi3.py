"""Phi 3, 3.5 and 4 mini (Microsoft, 2024): Llama with fused tensors; some rotate a part of each head, by long-range factors."""

from __future__ import annotations

from nanoengine.model_config import ModelConfig, TensorNames
from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import read_decoder, window_of

ARCHITECTURES = ("Phi3ForCausalLM",)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    for bias in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.expect(bias, False)
    names = TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))
    return read_decoder(fields, architecture, eps=1e-5, window=window_of(fields), may_be_partial=True, names=names)
