"""Seed-OSS (ByteDance Seed, 2025): Llama with biases of q, k and v."""

from __future__ import annotations

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import read_decoder
from nanoengine.models.model_config import ModelConfig

ARCHITECTURES = ("SeedOssForCausalLM",)


def read_config(fields: ConfigFields, _architecture: str) -> ModelConfig:
    return read_decoder(
        fields,
        head_dim=128,
        qkv_bias=fields.flag("attention_bias", True),
        o_bias=fields.flag("attention_out_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )
