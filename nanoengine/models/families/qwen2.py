"""Qwen 2 and 2.5 (Qwen team, 2024): Llama with biases of q, k and v."""

from __future__ import annotations

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import read_decoder
from nanoengine.models.families.windows import windows_of_qwen
from nanoengine.models.model_config import ModelConfig

ARCHITECTURES = ("Qwen2ForCausalLM",)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    return read_decoder(fields, architecture, qkv_bias=True, windows=windows_of_qwen(fields))
