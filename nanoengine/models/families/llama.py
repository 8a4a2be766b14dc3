"""Llama 2 and 3 (Touvron et al., 2023; Llama team, 2024), and models with the same decoder: SmolLM2, TinyLlama, distillates."""

from __future__ import annotations

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import biases_of, read_decoder
from nanoengine.models.model_config import ModelConfig

ARCHITECTURES = ("LlamaForCausalLM",)


def read_config(fields: ConfigFields, _architecture: str) -> ModelConfig:
    fields.expect("rope_interleaved", False)
    return read_decoder(fields, **biases_of(fields), mlp_bias=fields.flag("mlp_bias"))
