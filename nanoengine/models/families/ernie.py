"""Ernie 4.5, dense (Baidu, 2025): Llama whose heads rotate by pairs side by side."""

from __future__ import annotations

from dataclasses import replace

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import head_dim_of, read_decoder
from nanoengine.models.model_config import LayerConfig, ModelConfig
from nanoengine.models.rope_config import read_rope

ARCHITECTURES = ("Ernie4_5ForCausalLM",)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    rope, bias = replace(read_rope(fields, head_dim_of(fields, 128), 5e5), interleaved=True), fields.flag("use_bias")
    return read_decoder(
        fields,
        architecture,
        head_dim=128,
        eps=1e-5,
        tied=True,
        layers=(LayerConfig(rope=rope),),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )
